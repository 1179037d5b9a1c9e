"""Nodes for a benchmark, made of network namespaces on this machine (Linux, root, iproute2).

    node 0 [lo, eth0] --- shaped ---+
    node 1 [lo, eth0] --- shaped ---+--- bridge, in a namespace of its own

Processes of one node talk over its loopback, those of two nodes over a link that tbf holds to `rate` in each
direction. No interface outside these namespaces exists or is touched, and nothing leads out of them. They are removed
when the block ends, also by an error, Ctrl-C or SIGTERM; what a killed process left behind, the next one removes.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PREFIX = "turbogr"
PORT = 29500
BURST, LATENCY = "256kb", "50ms"


@dataclass(frozen=True)
class Network:
    names: list[str]
    """Of the nodes' namespaces."""
    rate: str

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def start(self, node: int, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """A process on a node."""
        whole = ["ip", "netns", "exec", self.names[node], *command]
        return subprocess.Popen(whole, env=environment, stdout=subprocess.DEVNULL, text=True)


def unavailable() -> str | None:
    """Why no such network can be made here; None where it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    try:
        with network(1):
            return None
    except OSError as error:
        return f"network namespaces are not permitted ({error})"


@contextlib.contextmanager
def network(nodes: int, rate: str = "1gbit") -> Iterator[Network]:
    """`nodes` nodes on one switch, each behind a full-duplex link of `rate`."""
    assert 1 <= nodes <= 250
    _sweep()
    own = f"{PREFIX}-{os.getpid()}"
    names, switch = [f"{own}-n{node}" for node in range(nodes)], f"{own}-switch"
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        for name in (switch, *names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        made = Network(names, rate)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for node, name in enumerate(names):
            port = f"port{node}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{made.address(node)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            for space, device in ((name, "eth0"), (switch, port)):
                shape = ("tbf", "rate", rate, "burst", BURST, "latency", LATENCY)
                _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", *shape)
        yield made
    finally:
        patient = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in (*names, switch):
            _delete(name)
        signal.signal(signal.SIGINT, patient)
        signal.signal(signal.SIGTERM, before)


def link_bytes() -> tuple[int, int]:
    """(sent, received) over this node's link since it was made, with headers and acknowledgements."""
    found = re.search(r"^\s*eth0:\s*(.+)$", Path("/proc/self/net/dev").read_text(), re.MULTILINE)
    assert found is not None, "not on a node"
    columns = [int(text) for text in found[1].split()]
    return columns[8], columns[0]


def left_behind() -> list[str]:
    """Namespaces of processes that are gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    ours = re.findall(rf"^({PREFIX}-(\d+)-\S+)", listed, re.MULTILINE)
    return [name for name, process in ours if not Path(f"/proc/{process}").exists()]


def _sweep() -> None:
    for name in left_behind():
        _delete(name)


def _delete(name: str) -> None:
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if answer.returncode:
        raise OSError(f"{' '.join(command)}: {answer.stderr.strip()}")


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
