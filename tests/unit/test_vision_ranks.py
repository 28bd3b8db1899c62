"""How ranks share out the images of a replica's rows."""

from types import SimpleNamespace

import pytest

from mrl.rank import vision


class OnDevice:
    """Features of an image on a device, of which the most that are there at once are counted."""

    now = most = 0

    def __init__(self, name: str):
        self.name = name
        OnDevice.now += 1
        OnDevice.most = max(OnDevice.most, OnDevice.now)

    def __del__(self):
        OnDevice.now -= 1

    def cpu(self) -> "OnHost":
        return OnHost(self.name)


class OnHost:
    def __init__(self, name: str):
        self.name = name

    def to(self, device: str) -> OnDevice:
        return OnDevice(self.name)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_has_the_features_of_one_image_on_its_device_whatever_a_step_has(monkeypatch, ranks):
    grids = {f"image {number}": [1, 4, 2 + 2 * number] for number in range(40)}
    sent = []
    group = SimpleNamespace(
        get_world_size=lambda group: ranks, get_rank=lambda group: 0, get_global_rank=lambda group, owner: owner,
        broadcast=lambda features, owner, group: sent.append((owner, features.name)),
    )  # fmt: skip
    monkeypatch.setattr(vision, "dist", group)
    monkeypatch.setattr(vision.mpu, "get_tensor_and_context_parallel_group", lambda: None)
    OnDevice.most = 0
    seen = vision.Vision.__new__(vision.Vision)
    seen._features = {"image 3": OnHost("image 3")}
    seen._device = "device"
    computed = []
    seen._features_of = lambda name, grid: (computed.append(name), OnDevice(name))[1]
    seen._room_for = lambda grid: OnDevice(f"image {grid[2] // 2 - 1}")  # what its owner sends
    seen._look(grids)
    assert {name: features.name for name, features in seen._features.items()} == {name: name for name in grids}
    assert OnDevice.most <= 2 and OnDevice.now == 0  # one, and the next that is made before it is let go
    assert len(computed) == len(set(computed)) and "image 3" not in computed
    assert (len(computed) == 39 and not sent) if ranks == 1 else (8 < len(computed) < 18 and len(sent) == 39)
