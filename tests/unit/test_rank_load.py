"""What a load brings back beside tensors: the numbers that generators draw next, and the rate of the next update.

The actor is a stand-in of one rank without parameters; the file, the manifest and the load are the real ones.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from test_checkpoints import CONFIG
from test_frozen import VALUES, Stored

from mrl.checkpoint.manifest import MASTER, WEIGHTS_ONLY, WITH_OPTIMIZER, Manifest, write_manifest
from mrl.config.schema import OptimConfig
from mrl.errors import EnvironmentFault
from mrl.model import model_spec
from mrl.rank.optimizer import build_scheduler, current_lr
from mrl.rank.rank_load import _load_optimizer_part, load_rank
from mrl.rank.rank_parameters import RankParameter
from mrl.rank.rank_save import HostCopy

EXPERTS = "expert-parallel-rng"
WARM_UP = {"lr": 8.0, "lr_warmup_steps": 8}  # update k, from 1, has rate k


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('store') / 'rendezvous'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.fixture
def experts():
    """The generator that Megatron's tracker has for experts. It and torch's are afterwards what they were before."""
    tracker, generator = get_cuda_rng_tracker(), torch.Generator().manual_seed(3)
    before = tracker.get_states()
    tracker.set_states({EXPERTS: generator})
    with torch.random.fork_rng(devices=[]):
        yield generator
    tracker.set_states(before)


class Device:
    """A platform whose generator is another than the host's."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(2)

    def rng_state(self) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)


class Residence:
    """Everything stays on the device; counts how often copies on the host were found out of date."""

    def __init__(self):
        self.forgotten = 0
        self.is_used = False

    @contextmanager
    def using(self, *kinds: str):
        self.is_used = True
        yield
        self.is_used = False

    def require(self, *kinds: str) -> None: ...

    def forget_copies(self) -> None:
        assert self.is_used
        self.forgotten += 1


def an_actor(tensor: int = 1, steps: int | None = None, **optim) -> SimpleNamespace:
    """One rank of `tensor`, of rates `optim` in a run of `steps`."""
    optimizer = SimpleNamespace(param_groups=[{"default_config": True}], chained_optimizers=[])
    layout = SimpleNamespace(model_dump=lambda: {"tensor_model_parallel_size": tensor})
    residence = Residence()
    config = OptimConfig(**optim)
    scheduler = build_scheduler(config, optimizer, steps)
    return SimpleNamespace(
        config=SimpleNamespace(
            actor=SimpleNamespace(layout=layout, optim=config), model=SimpleNamespace(dtype="float32", path="m")
        ),
        rank=0, layout=SimpleNamespace(world_size=1), trained=model_spec(CONFIG), chunks=[], platform=Device(),
        residence=residence, optimizer=optimizer, optimizers=(optimizer,), scheduler=scheduler, schedulers=(scheduler,),
        trained_beside=None, num_updates=0, skipped_in_a_row=0, lora=None, shards=(),
    )  # fmt: skip


def saved(actor: SimpleNamespace, folder, trainer: dict | None = None):
    """The folder of a checkpoint of it."""
    copy = HostCopy()
    copy.take(actor)
    layout = actor.config.actor.layout.model_dump()
    write_manifest(folder, Manifest(1, layout, "float32", CONFIG, (copy.write(folder),), trainer or {}, {}))
    return folder


def drawn(actor: SimpleNamespace, experts: torch.Generator) -> list[float]:
    """The next number of each generator."""
    generators = (torch.default_generator, actor.platform.generator, experts)
    return [float(torch.rand((), generator=generator)) for generator in generators]


def test_after_a_load_every_generator_draws_what_it_would_have_drawn_after_the_save(tmp_path, experts):
    actor = an_actor()
    torch.manual_seed(1)
    drawn(actor, experts)
    folder = saved(actor, tmp_path)
    expected = drawn(actor, experts)
    assert drawn(actor, experts) != expected
    load_rank(actor, folder)
    assert drawn(actor, experts) == expected and len(set(expected)) == 3


@pytest.mark.parametrize("why", ["another layout", "converted"])
def test_generators_go_on_where_the_checkpoint_has_no_states_for_these_ranks(tmp_path, experts, why):
    trainer = {"converted": WITH_OPTIMIZER} if why == "converted" else {}
    folder = saved(an_actor(), tmp_path, trainer)
    actor = an_actor(tensor=2 if why == "another layout" else 1)
    drawn(actor, experts)
    states = [g.get_state() for g in (torch.default_generator, actor.platform.generator, experts)]
    expected = [float(torch.rand((), generator=torch.Generator().manual_seed(0).set_state(s))) for s in states]
    load_rank(actor, folder)
    assert drawn(actor, experts) == expected


def test_after_a_load_updates_go_on_with_the_rates_that_were_next(tmp_path, experts):
    actor = an_actor(**WARM_UP)
    actor.scheduler.step(2)
    actor.num_updates = 2
    assert current_lr(actor.optimizer) == 3.0
    folder = saved(actor, tmp_path)
    again = an_actor(**WARM_UP)
    assert current_lr(again.optimizer) == 1.0
    load_rank(again, folder)
    assert (current_lr(again.optimizer), again.num_updates) == (3.0, 2)
    again.scheduler.step(1)
    assert current_lr(again.optimizer) == 4.0


def test_a_changed_schedule_goes_on_from_the_saved_count_and_a_saved_rate_that_is_none_of_its_is_refused(
    tmp_path, experts
):
    actor = an_actor(**WARM_UP)
    actor.scheduler.step(2)
    folder = saved(actor, tmp_path)
    doubled = an_actor(**WARM_UP | {"lr": 16.0})
    load_rank(doubled, folder)
    assert current_lr(doubled.optimizer) == 6.0  # the third of eight steps to 16
    actor.optimizer.param_groups[0]["lr"] = 5.0  # not what its schedule says
    (tmp_path / "wrong").mkdir()
    folder = saved(actor, tmp_path / "wrong")
    with pytest.raises(EnvironmentFault, match=r"after loading is 3\.0, not 5\.0"):
        load_rank(an_actor(**WARM_UP), folder)


@pytest.mark.parametrize("style", ["constant", "linear"])
def test_a_run_that_is_made_longer_does_not_warm_up_again(tmp_path, experts, style):
    optim = {"lr": 8.0, "lr_warmup_steps_ratio": 0.1, "lr_decay_style": style}
    actor = an_actor(steps=20, **optim)
    actor.scheduler.step(9)
    folder = saved(actor, tmp_path)
    longer = an_actor(steps=400, **optim)
    load_rank(longer, folder)
    assert longer.scheduler.lr_warmup_steps == 2
    assert current_lr(longer.optimizer) == (8.0 if style == "constant" else pytest.approx(8.0 * 390 / 398))


def test_a_load_makes_copies_of_frozen_weights_on_the_host_out_of_date(tmp_path, experts):
    """Routers' constants are loaded, too, perhaps after they have left the device."""
    actor = an_actor()
    folder = saved(actor, tmp_path)
    assert actor.residence.forgotten == 0
    load_rank(actor, folder)
    assert actor.residence.forgotten == 1


def test_a_checkpoint_of_weights_alone_begins_the_schedule(tmp_path, experts):
    actor = an_actor(**WARM_UP)
    actor.scheduler.step(2)
    folder = saved(actor, tmp_path, {"converted": WEIGHTS_ONLY})
    again = an_actor(**WARM_UP)
    load_rank(again, folder)
    assert current_lr(again.optimizer) == 1.0


def test_master_weights_that_an_adam_keeps_apart_and_those_that_megatron_knows_are_both_loaded():
    """As on the host: HybridDeviceOptimizer updates copies of its own."""
    parameter = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    main, kept_apart = torch.zeros(6), torch.zeros(6)
    adam = SimpleNamespace(master=lambda tensor: kept_apart, set_moments=lambda *given: None)
    group = {"params": [main]}
    optimizer = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[group]), model_param_group_index_map={parameter: (0, 0)}
    )
    shard = SimpleNamespace(local_shape=(2, 3), pieces=())
    with torch.no_grad():
        _load_optimizer_part(Stored(), RankParameter(shard, parameter, optimizer, (0, 6), adam), 7.0, has_masters=True)
    assert torch.equal(main, torch.full((6,), VALUES[MASTER])) and torch.equal(kept_apart, main)
