"""Runs a function on several gloo ranks, processes of their own, and collects what each answers or raises.

The processes are forked from a server that has loaded torch once; what runs there must stand at the top of a module.
"""

import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "turbogr.train.trainer", "tests.support.ranks"])


class RankFailed(AssertionError):
    """What the ranks that failed have to say, each with its traceback."""


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
    """[function(ranks, *arguments) on every rank, in their order]; raises RankFailed where one fails or is late."""
    answers = try_ranks(world, function, *arguments, timeout_s=timeout_s)
    failed = [f"rank {rank}:\n{words}" for rank, (good, words) in enumerate(answers) if not good]
    if failed:
        raise RankFailed("\n".join(failed))
    return [answer for _, answer in answers]


def try_ranks(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 120.0,
    variables: dict[str, str] | None = None,
) -> list[tuple[bool, Any]]:
    """(True, answer) or (False, traceback) of every rank; `variables` are set in their environment."""
    port = _free_port()
    started = []
    for rank in range(world):
        here, there = CONTEXT.Pipe(duplex=False)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **(variables or {}),
        }
        process = CONTEXT.Process(target=_rank, args=(there, environment, function, arguments), daemon=True)
        process.start()
        there.close()
        started.append((process, here))
    try:
        return [_answer(here, timeout_s) for _, here in started]
    finally:
        for process, _ in started:
            process.join(5.0)
            if process.is_alive():
                process.kill()


def _answer(here: Connection, timeout_s: float) -> tuple[bool, Any]:
    if not wait([here], timeout_s):
        return False, f"no answer within {timeout_s} s"
    try:
        good, words = here.recv()
    except EOFError:
        return False, "ended without a word"
    # as bytes: a tensor sent as such would lie in the memory of a process that has ended
    return good, torch.load(io.BytesIO(words), weights_only=False) if good else words


def _rank(there: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    from turbogr.ranks import joined

    try:
        with joined() as ranks:
            answer = io.BytesIO()
            torch.save(function(ranks, *arguments), answer)
            there.send((True, answer.getvalue()))
    except BaseException:
        there.send((False, traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
