"""fbgemm's table-batched embedding on the CPU, one side of `benchmarks.table`, in the environment that has fbgemm.

Commands on stdin, each answered by one line of JSON:
    facts         versions, threads, allocator, and how much of its memory lies in huge pages
    step NUMBER   seconds of one step with that batch: forward, and backward with the update that is fused into it
    save PATH     the weights, as .npy
"""

import json
import os
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from turbogr.device import tune_allocator


class Side:
    def __init__(self, given: dict[str, Any]) -> None:
        kept = np.load(given["batches"])
        self.ids, self.gradients = torch.from_numpy(kept["ids"]), torch.from_numpy(kept["gradients"])
        # without pooling, or bags of one id each: the same rows by two of its code paths
        pooled = given["pooling"] == "bags"
        self.table = SplitTableBatchedEmbeddingBagsCodegen(
            [(given["rows"], given["dim"], EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=given["lr"],
            eps=given["eps"],
            pooling_mode=PoolingMode.SUM if pooled else PoolingMode.NONE,
        )
        (self.weights,) = self.table.split_embedding_weights()
        if given["weights"] is None:
            self.weights.uniform_(-0.04, 0.04)
        else:
            self.weights.copy_(torch.from_numpy(np.load(given["weights"])))
        count = self.ids.shape[1]
        self.offsets = torch.arange(count + 1) if pooled else torch.tensor([0, count])

    def step(self, number: int) -> float:
        begin = time.perf_counter()
        self.table(self.ids[number], self.offsets).backward(self.gradients)
        return time.perf_counter() - begin


def huge_gib() -> float:
    found = re.search(r"^AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) / 2**20 if found else 0.0


def main() -> None:
    # what a library prints must not stand among the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    given, allocator = json.loads(sys.argv[1]), tune_allocator()
    torch.set_num_threads(given["threads"])
    side = Side(given)
    for line in sys.stdin:
        command, *rest = line.split()
        answer: dict[str, Any] = {}
        if command == "facts":
            packages = ("torch", "fbgemm-gpu-cpu", "torchrec")
            answer = {"versions": {name: version(name) for name in packages}, "allocator": allocator}
            answer |= {"threads": torch.get_num_threads(), "huge_gib": huge_gib()}
        elif command == "step":
            answer = {"seconds": side.step(int(rest[0]))}
        elif command == "save":
            np.save(rest[0], side.weights.detach().numpy())
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
