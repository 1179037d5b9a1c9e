"""The processes of one run, as torchrun starts them, and what they tell one another.

    torchrun --nproc-per-node 4 -m turbogr train CONFIG        world 4, rank 0 .. 3

Facts, messages and whatever lies on a CPU go through gloo, tensors on an accelerator through its own library. Nothing
is pickled. A rank that is gone, or does not answer in time, becomes one sentence on the others.

W ranks
"""

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from turbogr.errors import SaidByAll, TrainingError, UserError
from turbogr.launch import rank, world_size
from turbogr.pulse import Pulse, meeting_place

TIMEOUT = "TURBOGR_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run; one process alone says and hears nothing."""

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None
    """The connection of these ranks alone; None is that of all."""

    @property
    def first(self) -> bool:
        """The one that writes files and speaks to the user."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.world == 1

    def gather(self, values: Tensor) -> Tensor:
        """[W, ...]: `values` of every rank, of one shape and dtype."""
        if self.alone:
            return values.unsqueeze(0)
        values = values.contiguous()
        every = values.new_empty(self.world * values.numel())
        with self._heard():
            dist.all_gather_single(every, values.view(-1), group=self.group)
        return every.view(self.world, *values.shape)

    def gather_rows(self, values: Tensor, counts: list[int]) -> list[Tensor]:
        """`values` [counts[rank], ...] of every rank, whose numbers of rows everyone knows."""
        most = max(counts)
        padded = values.new_zeros(most, *values.shape[1:])
        padded[: len(values)] = values
        return [part[:count] for part, count in zip(self.gather(padded), counts, strict=True)]

    def swap(self, values: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """One all-to-all: `values` holds send[r] entries for every rank r in turn, the answer receive[r] of each."""
        if self.alone:
            return values
        arrived = values.new_empty(sum(receive))
        with self._heard():
            dist.all_to_all_single(arrived, values.contiguous(), receive, send, group=self.group)
        return arrived

    def begin_sum(self, values: Tensor) -> Any:
        """Starts to replace `values` by its sum over the ranks, the same bits on each; `finish` awaits it."""
        assert not self.alone
        with self._heard():
            return dist.all_reduce(values, group=self.group, async_op=True)

    def finish(self, work: Any) -> None:
        with self._heard():
            work.wait()

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over the ranks."""
        if self.alone:
            return values
        total = values.clone()
        self.finish(self.begin_sum(total))
        return total

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if not self.alone:
            self.gather(torch.zeros(1))

    def texts(self, own: str) -> list[str]:
        """What every rank says."""
        if self.alone:
            return [own]
        said = torch.frombuffer(bytearray(own.encode() or b" "), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([len(said)])).flatten().tolist()
        return [bytes(part.numpy()).decode().strip() for part in self.gather_rows(said, sizes)]

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Every rank ends the block well, or every rank raises what the first one that failed has to say."""
        if self.alone:
            yield
            return
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        if isinstance(failed, SaidByAll):
            raise failed
        said = self.texts("" if failed is None else str(failed) or type(failed).__name__)
        culprits = [number for number, words in enumerate(said) if words]
        if not culprits:
            return
        if failed is not None and not isinstance(failed, UserError | OSError):
            raise failed  # a bug keeps its traceback
        words = said[culprits[0]]
        raise SaidByAll(words if len(culprits) == self.world else f"rank {culprits[0]}: {words}") from failed

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        """Counts the time that a collective takes, and says in a sentence that another rank is gone or late."""
        begin = time.perf_counter()
        try:
            yield
            _TALKED[0] += time.perf_counter() - begin
        except RuntimeError as error:
            # torchrun ends this process, too, when it sees the other one gone: time to say which it was
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            silent = _PULSE[-1].silent() if _PULSE else []
            who = " and ".join(f"rank {one}" for one in silent) or "another rank"
            reason = str(error).strip().splitlines()[0][:200]
            raise TrainingError(
                f"rank {rank()} lost {who}, which ended or did not answer within {timeout_s():g} s "
                f"({reason}): what it said last tells why; --resume continues from the newest checkpoint."
            ) from error


ALONE = Ranks()
_PULSE: list[Pulse] = []
"""Of this process, while it has joined others."""
_TALKED = [0.0]


def talked_s() -> float:
    """Seconds that this process has spent in collectives so far, waiting for other ranks and for the wire."""
    return _TALKED[0]


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun started, connected for as long as the block lasts; one process alone without torchrun."""
    if world_size() == 1:
        yield ALONE
        return
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise UserError(f"WORLD_SIZE is {world_size()} but the ranks have no place to meet: start them with torchrun.")
    device = torch.accelerator.current_accelerator(check_available=True)
    backend = "gloo"
    if device is not None:
        backend = f"{device.type}:{dist.get_default_backend_for_device(device)},cpu:gloo"
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())
    try:
        dist.init_process_group(
            backend,
            store=meeting_place(timeout_s()),
            rank=rank(),
            world_size=world_size(),
            timeout=datetime.timedelta(seconds=timeout_s()),
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"the ranks did not find one another ({reason}): start them with torchrun.") from error
    _PULSE.append(Pulse(rank(), world_size()))
    try:
        yield Ranks(rank(), world_size())
    finally:
        _PULSE.pop().stop()
        dist.destroy_process_group()


def timeout_s() -> float:
    """How long a rank waits for another one."""
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text or DEFAULT_TIMEOUT_S)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise UserError(f"{TIMEOUT} must be a number of seconds above 0, not {text!r}.")
    return seconds


__all__ = ["ALONE", "Ranks", "joined", "talked_s", "timeout_s"]
