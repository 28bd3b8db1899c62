"""Storages leave their device and come back under the tensors that lie on them; host memory is made once,
and misuse is refused.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state as mpu

from mrl.config.schema_actor import GRADIENTS, OPTIMIZER, PARAMETERS
from mrl.rank import parallel
from mrl.rank.critic import MegatronCritic
from mrl.rank.offload import Residence, StorageBuffer, bytes_of, check_resident, needs, reserve

KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER)


class Host:
    """A platform that counts the host memory that it makes."""

    def __init__(self):
        self.made, self.besides = [], 0

    def host_memory(self, nbytes: int) -> torch.Tensor:
        self.made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        pass

    release_cache = synchronize

    @contextmanager
    def beside(self):
        self.besides += 1
        yield


class Chunk(torch.nn.Module):
    """Two trained weights that are views of one buffer, as Megatron's are, and a frozen one beside."""

    def __init__(self):
        super().__init__()
        self.data, grads = torch.arange(6.0), torch.zeros(6)
        self.a, self.b = torch.nn.Parameter(self.data[:4].view(2, 2)), torch.nn.Parameter(self.data[4:])
        self.frozen = torch.nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
        self.buffers, self.expert_parallel_buffers = (
            [SimpleNamespace(grad_data=grads[:4].clone())],
            [SimpleNamespace(grad_data=grads[4:])],
        )

    def forward(self):
        return self.a.sum()


class World:
    """A chunk, an Adam over float32 copies of its weights, and what decides where they are."""

    def __init__(self, switched=KINDS):
        self.chunk, self.host = Chunk(), Host()
        self.adam = torch.optim.AdamW([p.detach().clone() for p in (self.chunk.a, self.chunk.b)], lr=0.1)
        part = SimpleNamespace(optimizer=self.adam)
        self.optimizer = SimpleNamespace(chained_optimizers=[part], zero_grad=self.adam.zero_grad)
        self.residence = Residence(self.host, [self.chunk], self.optimizer, switched)

    @property
    def masters(self) -> list[torch.Tensor]:
        return self.adam.param_groups[0]["params"]

    def step(self) -> None:
        with self.residence.using(*KINDS):
            for master in self.masters:
                master.grad = torch.ones_like(master)
            self.adam.step()
            self.chunk.data[:4].copy_(self.masters[0].reshape(-1))

    def sizes(self) -> dict[str, int]:
        tensors = {
            PARAMETERS: [self.chunk.data, self.chunk.frozen],
            GRADIENTS: [b.grad_data for b in (*self.chunk.buffers, *self.chunk.expert_parallel_buffers)],
            OPTIMIZER: self.masters + [v for state in self.adam.state.values() for v in state.values() if v.dim()],
        }
        return {kind: sum(t.untyped_storage().nbytes() for t in of_kind) for kind, of_kind in tensors.items()}


def test_what_left_comes_back_under_the_same_tensors_bit_for_bit():
    kept, moved = World(()), World()
    for _ in range(3):
        for world in (kept, moved):
            world.residence.offload()
            world.step()
    with moved.residence.using(PARAMETERS, OPTIMIZER):
        assert torch.equal(moved.chunk.a, kept.chunk.a) and moved.chunk.a.data_ptr() == moved.chunk.data.data_ptr()
        assert torch.equal(moved.chunk.frozen, kept.chunk.frozen)
        for one, other in zip(moved.masters, kept.masters, strict=True):
            assert torch.equal(one, other)
            assert all(
                torch.equal(moved.adam.state[one][name], kept.adam.state[other][name])
                for name in ("exp_avg", "exp_avg_sq", "step")
            )


def test_only_what_is_in_use_has_memory_on_the_device():
    world = World()
    world.step()
    full = world.sizes()
    assert full == {PARAMETERS: 36, GRADIENTS: 40, OPTIMIZER: 72}
    world.residence.offload()
    assert world.sizes() == dict.fromkeys(KINDS, 0)
    with world.residence.using(PARAMETERS):
        assert world.sizes() == full | {GRADIENTS: 0, OPTIMIZER: 0}
        with world.residence.using(GRADIENTS):
            assert world.sizes() == full | {OPTIMIZER: 0}
            assert not any(b.grad_data.any() for b in world.chunk.buffers)


@pytest.fixture
def late_copies(monkeypatch):
    """Copies that are enqueued beside what computes are made when somebody waits for them, as a device may do."""
    pending, is_beside = [], []
    copy_to = StorageBuffer.copy_to

    class Late(Host):
        @contextmanager
        def beside(self):
            is_beside.append(True)
            yield
            is_beside.clear()

        def synchronize(self) -> None:
            while pending:
                pending.pop(0)()

    def enqueue(buffer, target):
        if is_beside:
            pending.append(partial(copy_to, buffer, target))
        else:
            copy_to(buffer, target)

    monkeypatch.setattr(StorageBuffer, "copy_to", enqueue)
    return Late(), pending


def test_what_was_sent_for_ahead_is_there_bit_for_bit_once_it_is_used(late_copies):
    kept, moved = World(()), World()
    moved.host, pending = late_copies
    moved.residence._platform = moved.host
    for world in (kept, moved):
        world.step()
    full = moved.sizes()
    moved.residence.offload()
    with moved.residence.using(PARAMETERS):
        moved.residence.prefetch(OPTIMIZER)
        assert moved.sizes() == full | {GRADIENTS: 0} and pending
    with moved.residence.using(PARAMETERS):
        assert pending, "what computes log-probs again does not wait, and sends nothing off that is on its way"
        with pytest.raises(RuntimeError, match="optimizer_offload"):
            moved.residence.require(OPTIMIZER)
    for world in (kept, moved):
        world.step()
    assert not pending and all(torch.equal(one, other) for one, other in zip(moved.masters, kept.masters, strict=True))


def test_what_was_sent_for_ahead_leaves_again_with_the_rest_and_twice_is_once(late_copies):
    world = World()
    world.host, pending = late_copies
    world.residence._platform = world.host
    world.step()
    masters = [master.clone() for master in world.masters]
    world.residence.offload()
    for _ in range(2):
        world.residence.prefetch(OPTIMIZER)
    wanted = len(pending)
    world.residence.offload()
    assert world.sizes() == dict.fromkeys(KINDS, 0) and wanted == len(world.residence._emptied[OPTIMIZER])
    with world.residence.using(OPTIMIZER):
        assert all(torch.equal(master, before) for master, before in zip(world.masters, masters, strict=True))
        world.residence.prefetch(OPTIMIZER)  # it is there
    assert not pending


def test_nothing_moves_without_its_switch():
    world = World((GRADIENTS,))
    world.step()
    full = world.sizes()
    world.residence.offload()
    assert world.sizes() == full | {GRADIENTS: 0}
    assert world.host.made == []


def test_host_memory_is_made_when_something_first_leaves_and_never_again():
    world = World()
    world.residence.offload()
    assert sum(world.host.made) == 36 + 24  # there are no moments yet
    for _ in range(4):
        world.step()
        world.residence.offload()
    assert sum(world.host.made) == sum(buffer.nbytes for buffer in world.residence._buffers.values()) == 36 + 72


@pytest.fixture
def copied(monkeypatch) -> list[int]:
    """Bytes of each storage that is copied to the host."""
    sizes, copy_from = [], StorageBuffer.copy_from
    monkeypatch.setattr(StorageBuffer, "copy_from", lambda buffer, x: (sizes.append(x.numel()), copy_from(buffer, x)))
    return sizes


def hand_over(world: World, copied: list[int]) -> list[int]:
    """What leaves is copied; then it comes back."""
    copied.clear()
    world.residence.offload()
    with world.residence.using(PARAMETERS):
        return sorted(copied)


TRAINED, FROZEN = 24, 12  # bytes of the chunk's two storages of parameters


def test_frozen_parameters_are_copied_to_the_host_once(copied):
    world = World((PARAMETERS,))
    assert hand_over(world, copied) == [FROZEN, TRAINED]
    for value in (1.0, 2.0):
        with world.residence.using(PARAMETERS):
            world.chunk.data.fill_(value)
        assert hand_over(world, copied) == [TRAINED]
        with world.residence.using(PARAMETERS):
            assert torch.equal(world.chunk.data, torch.full((6,), value))
            assert torch.equal(world.chunk.frozen, torch.full((3,), 7.0))
    assert sum(world.host.made) == TRAINED + FROZEN
    assert world.residence.left_bytes[PARAMETERS] == TRAINED + FROZEN  # as many are off the device


def test_a_model_without_an_optimizer_is_copied_once(copied):
    """The teacher."""
    world = World((PARAMETERS,))
    world.chunk.requires_grad_(False)
    assert hand_over(world, copied) == [FROZEN, TRAINED]
    assert hand_over(world, copied) == []


def test_frozen_parameters_that_were_changed_are_copied_again(copied):
    """A checkpoint's routers' constants are loaded after a departure."""
    world = World((PARAMETERS,))
    hand_over(world, copied)
    with world.residence.using(PARAMETERS):
        world.chunk.frozen.data.fill_(5.0)
        world.residence.forget_copies()
    assert hand_over(world, copied) == [FROZEN, TRAINED]
    assert hand_over(world, copied) == [TRAINED]
    with world.residence.using(PARAMETERS):
        assert torch.equal(world.chunk.frozen, torch.full((3,), 5.0))


def test_another_storage_of_a_frozen_parameter_is_copied(copied):
    world = World((PARAMETERS,))
    hand_over(world, copied)
    with world.residence.using(PARAMETERS):
        world.chunk.frozen.data = torch.full((3,), 5.0)
    assert hand_over(world, copied) == [FROZEN, TRAINED]
    with world.residence.using(PARAMETERS):
        world.chunk.frozen.data = torch.full((4,), 6.0)
    assert hand_over(world, copied) == [16, TRAINED]
    with world.residence.using(PARAMETERS):
        assert torch.equal(world.chunk.frozen, torch.full((4,), 6.0))


def test_a_parameter_is_copied_once_from_when_it_is_frozen(copied):
    world = World((PARAMETERS,))
    hand_over(world, copied)
    world.chunk.requires_grad_(False)
    with world.residence.using(PARAMETERS):
        world.chunk.data.fill_(3.0)  # by the last update
    assert hand_over(world, copied) == [TRAINED]
    assert hand_over(world, copied) == []
    world.chunk.requires_grad_(True)
    assert hand_over(world, copied) == [FROZEN, TRAINED]


def test_moments_that_a_checkpoint_made_anew_take_the_places_of_the_old():
    world = World()
    world.step()
    world.residence.offload()
    with world.residence.using(OPTIMIZER):
        for state in world.adam.state.values():
            state |= {name: torch.full_like(state[name], 5.0) for name in ("exp_avg", "exp_avg_sq")}
    made = list(world.host.made)
    world.residence.offload()
    with world.residence.using(OPTIMIZER):
        assert all((state["exp_avg"] == 5.0).all() for state in world.adam.state.values())
    assert world.host.made == made


def test_what_is_in_use_does_not_leave_and_what_left_is_not_computed_with():
    world = World()
    with (
        world.residence.using(PARAMETERS),
        pytest.raises(RuntimeError, match="parameters cannot leave the device: in use"),
    ):
        world.residence.offload()
    world.residence.offload()
    with pytest.raises(RuntimeError, match=r"parameters: not on the device \(actor\.param_offload\)"):
        world.chunk()
    with pytest.raises(RuntimeError, match=r"gradients, optimizer: .*actor\.grad_offload, actor\.optimizer_offload"):
        world.residence.require(GRADIENTS, OPTIMIZER)
    with pytest.raises(RuntimeError, match="weights: not on the device"):
        check_resident("weights", [torch.zeros(2), world.chunk.b])
    with world.residence.using(PARAMETERS):
        assert world.chunk() == 6.0


def test_an_error_ends_the_use():
    world = World()
    with pytest.raises(ValueError, match="inside"), world.residence.using(PARAMETERS):
        raise ValueError("inside")
    world.residence.offload()
    assert world.sizes()[PARAMETERS] == 0


class Full:
    """A storage of a device that has no memory for it."""

    def __init__(self, storage: torch.UntypedStorage):
        self.storage = storage

    def resize_(self, nbytes: int) -> None:
        if nbytes:
            raise MemoryError(f"no {nbytes} bytes")
        self.storage.resize_(0)


def test_a_return_for_which_memory_runs_out_leaves_everything_away_and_can_be_tried_again():
    kept, world = World(()), World()
    for one in (kept, world):
        one.step()
    world.residence.offload()
    whole = world.residence._emptied[OPTIMIZER]
    world.residence._emptied[OPTIMIZER] = [whole[0], replace(whole[1], storage=Full(whole[1].storage)), *whole[2:]]
    with pytest.raises(MemoryError), world.residence.using(OPTIMIZER):
        pass
    assert world.sizes()[OPTIMIZER] == 0
    with pytest.raises(RuntimeError, match="optimizer: not on the device"):
        world.residence.require(OPTIMIZER)
    world.residence._emptied[OPTIMIZER] = whole
    with world.residence.using(OPTIMIZER):
        assert all(torch.equal(*pair) for pair in zip(world.masters, kept.masters, strict=True))


def test_a_method_says_what_it_needs():
    class Owner:
        def __init__(self, residence: Residence):
            self.residence = residence

        @needs(PARAMETERS)
        def total(self, factor: float) -> float:
            """Doubled."""
            return float(world.chunk.data.sum()) * factor

    world = World()
    world.residence.offload()
    assert Owner(world.residence).total(factor=2.0) == 30.0
    assert Owner.total.__doc__ == "Doubled."


@pytest.mark.parametrize("piece", [4, 5, 16, 1000])
def test_buffers_of_any_piece_size_keep_give_and_exchange_every_byte(piece):
    sizes, made = [16, 4, 36, 8], []

    def allocate(nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    sources = [torch.randn(size // 4) for size in sizes]
    buffers = reserve(sizes, allocate, piece)
    assert sum(made) == sum(sizes) == sum(b.nbytes for b in buffers) and max(made) <= piece
    for buffer, source in zip(buffers, sources, strict=True):
        buffer.copy_from(bytes_of(source.untyped_storage()))
    for buffer, source in zip(buffers, sources, strict=True):
        other = torch.zeros_like(source)
        buffer.exchange(bytes_of(other.untyped_storage()))
        assert torch.equal(other, source)
        buffer.copy_to(bytes_of(other.untyped_storage()))
        assert not other.any()
    with pytest.raises(RuntimeError, match="8 bytes do not fit a buffer of 16"):
        buffers[0].copy_from(bytes_of(torch.zeros(2).untyped_storage()))


def test_what_left_is_counted_by_kind():
    """float32: six trained weights and three frozen ones, gradients of 4 and in a storage of 6, six master weights."""
    world = World()
    world.residence.offload()
    assert world.residence.left_bytes == {PARAMETERS: 36, GRADIENTS: 40, OPTIMIZER: 24}
    kept = World(switched=())
    kept.residence.offload()
    assert not kept.residence.left_bytes


def test_a_critic_in_groups_of_its_own_releases_its_scratch_though_nothing_of_it_leaves(monkeypatch):
    """The actor's scratch stays: whoever has the device next is the actor."""
    groups = parallel.OtherGroups()
    own = SimpleNamespace(buffer={"gathered": torch.zeros(4)})
    of_actor = SimpleNamespace(buffer={"gathered": torch.zeros(4)})
    monkeypatch.setattr(mpu, "_GLOBAL_MEMORY_BUFFER", of_actor)
    with groups.in_place():
        mpu._GLOBAL_MEMORY_BUFFER = own
    critic = MegatronCritic.__new__(MegatronCritic)
    critic.in_place = groups.in_place
    critic._has_own_groups = True
    critic.residence = World(()).residence
    critic.offload()
    assert not own.buffer and of_actor.buffer
    assert mpu.get_global_memory_buffer() is of_actor
