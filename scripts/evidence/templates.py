"""What we write of conversations with tools, beside what models' own chat templates write of them.

    python scripts/evidence/templates.py FOLDER --out docs/results/templates.json [--conversations 500]

FOLDER has a folder for each model: its tokenizer, or its `chat_template.jinja` alone, which then gets a small tokenizer
with the family's own tokens. Templates are their authors' and are not stored here; the result names each by its digest.
tests/unit/dialect_conversations.py draws the conversations and says how a round is compared, and which causes of a
difference are looked for. A template with a switch for thoughts is compared with it off, too. Exit code 1 where a round
has no cause.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit"))

import dialect_templates  # noqa: E402
from dialect_conversations import UNEXPLAINED, Family, causes  # noqa: E402
from stamp import facts  # noqa: E402

from mrl.data.dataset import THINKING  # noqa: E402

TEMPLATE = "chat_template.jinja"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=500, help="for each template")
    options = parser.parse_args()
    found = facts("python scripts/evidence/templates.py {work}/templates --out docs/results/templates.json")
    rows = [row for folder in folders(options.folder) for row in compared(folder, options.conversations)]
    options.out.write_text(json.dumps(found | {"templates": rows}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['name']:20} {row['thinking']:8} {row['causes']}")
    return int(any(row["causes"].get(UNEXPLAINED) for row in rows))


def folders(folder: Path) -> list[Path]:
    """Those that have a template, in a file of its own or in a tokenizer's."""
    return sorted(each for each in folder.iterdir() if any((each / file).exists() for file in (TEMPLATE, _TOKENIZER)))


_TOKENIZER = "tokenizer_config.json"


def compared(folder: Path, conversations: int) -> Iterator[dict[str, Any]]:
    """A row with the template as it is, and one with its thoughts off where it has a switch."""
    tokens = tokenizer_of(folder)
    switches: list[dict[str, Any]] = [{}]
    if THINKING in tokens.chat_template:
        switches.append({THINKING: False})
    for switch in switches:
        family = Family(tokens, **switch)
        by_kind = causes(family, 0, conversations)
        total = sum(by_kind.values(), Counter())
        yield {
            "name": folder.name, "sha256": hashlib.sha256(tokens.chat_template.encode()).hexdigest(),
            "form": family.dialect.name, "thinking": "off" if switch else "as it is",
            "conversations": total.pop("conversations"), "rounds": total.pop("rounds"), "equal": total.pop("equal", 0),
            "causes": total, "kinds": by_kind,
        }  # fmt: skip


def tokenizer_of(folder: Path) -> Any:
    """The model's own tokenizer where it is there."""
    if (folder / _TOKENIZER).exists():
        return AutoTokenizer.from_pretrained(folder)
    template = (folder / TEMPLATE).read_text(encoding="utf-8")
    return dialect_templates.tokenizer("glm" if "<|observation|>" in template else "hermes", template)


if __name__ == "__main__":
    sys.exit(main())
