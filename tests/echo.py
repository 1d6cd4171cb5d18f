"""A worker for tests of launchers. It imports heavy libraries only where a method needs them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlhfspec_mega.errors import UserError

if TYPE_CHECKING:
    import torch

    from rlhfspec_mega.megatron.rendezvous import Rendezvous
    from rlhfspec_mega.resharding.buckets import Bucket


def content(bucket: Bucket) -> torch.Tensor:
    """Random bytes, the same for every caller."""
    import torch

    generator = torch.Generator().manual_seed(bucket.id)
    return torch.randint(0, 256, (bucket.bytes,), dtype=torch.uint8, generator=generator)


class Echo:
    """Answers, fails, hangs and dies when told to."""

    def __init__(self, refuse: bool = False) -> None:
        if refuse:
            raise UserError("The worker refuses: give it another name.")

    def greet(self, who: str) -> str:
        return f"Hello {who}"

    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def fail(self) -> None:
        raise ValueError("deliberate")

    def complain(self) -> None:
        raise UserError("Wrong input: correct it.")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave_a_child(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    def double(self, data: torch.Tensor) -> torch.Tensor:
        return 2 * data

    def all_reduce(self, rendezvous: Rendezvous, value: float) -> float:
        import torch
        import torch.distributed as dist

        seconds = timedelta(seconds=rendezvous.call_timeout)
        rank, size = rendezvous.rank, rendezvous.world_size
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=seconds, **rendezvous.arguments())
        total = torch.tensor([value])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item()

    def send(self, address: Any, buckets: list[Bucket]) -> None:
        sender = address.sender(0)
        for bucket in buckets:
            sender.send(bucket, content(bucket))

    def receive(self, address: Any, index: int, buckets: list[Bucket], pause: float = 0.0) -> list[int]:
        from rlhfspec_mega.resharding.buckets import checksum

        receiver = address.receiver(index)
        sums = []
        for bucket in buckets:
            data = receiver.receive(bucket)
            time.sleep(pause)
            sums.append(checksum(data))
        receiver.close()
        return sums


class Numbered(Echo):
    """Knows how often it was started."""

    def __init__(self, launch: int) -> None:
        super().__init__()
        self._launch = launch

    def which(self) -> int:
        return self._launch
