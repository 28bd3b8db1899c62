"""`mrl convert`."""

import argparse


def add(commands) -> None:
    """Registers the command."""
    convert = commands.add_parser("convert", help="convert checkpoints")
    convert.set_defaults(parser=convert)
    conversions = convert.add_subparsers(dest="conversion", metavar="WHICH")
    to_hf = conversions.add_parser("megatron-to-hf", help="write a saved step as a Hugging Face checkpoint")
    to_hf.add_argument("checkpoint", help="a step-N folder, or a run directory for its newest one")
    to_hf.add_argument("-o", "--output", required=True, help="folder to write; must not exist or be empty")
    to_hf.set_defaults(run=_megatron_to_hf)


def _megatron_to_hf(options: argparse.Namespace) -> None:
    from mrl.convert import megatron_to_hf

    written = megatron_to_hf(options.checkpoint, options.output)
    print(f"wrote {written} tensors to {options.output}")
