"""Every setting: frozen dataclasses, their defaults, and what each means."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    store: str = ""
    """Folder of the prepared store (`turbogr data prepare` makes one)."""


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    protocol: Literal["leave-one-out", "leave-one-out-validation", "global-time"] = "leave-one-out"
    """leave-one-out: the last event is the test. leave-one-out-validation: the last is the test, the last but one the
    validation, neither is trained on. global-time: everything before `time` trains, each user's first event from `time`
    on is the test."""
    time: int | None = None
    """global-time: where the test begins, in the store's time unit."""
    validation_time: int | None = None
    """global-time: where the validation begins (training then ends there); none without it."""


@dataclass(frozen=True, kw_only=True)
class HstuConfig:
    time_bias: bool = True
    """Relative time bias between the next event and each earlier one."""
    position_bias: bool = True
    """Relative position bias."""
    time_buckets: int = 128
    """Time differences fall into buckets 0 .. time_buckets, on a logarithmic scale."""
    bucket_width: float = 0.301
    """Width of a bucket in ln(seconds)."""


@dataclass(frozen=True, kw_only=True)
class SasrecConfig:
    ffn_dim: int = 0
    """Hidden width of the feed-forward part; 0 takes `dim`."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str = "hstu"
    """hstu, sasrec, or an encoder that a package registers under the entry point `turbogr.encoders`."""
    dim: int = 64
    """Width of the item embedding and of the encoder."""
    blocks: int = 2
    heads: int = 2
    max_history: int = 200
    """Latest events of a user that the model sees; older ones are cut."""
    length_margin: int = 11
    """The attention's divisor and the position table's length are max_history + length_margin (public recipe: 11)."""
    dropout: float = 0.2
    recompute: bool = False
    """Keep only the input of every block for the backward, which computes the block again: less memory, more time."""
    hstu: HstuConfig = field(default_factory=HstuConfig)
    sasrec: SasrecConfig = field(default_factory=SasrecConfig)

    @property
    def max_len(self) -> int:
        return self.max_history + self.length_margin


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    temperature: float = 0.05
    """Cosine similarities are divided by it before the softmax."""


@dataclass(frozen=True, kw_only=True)
class NegativesConfig:
    sampler: Literal["uniform", "popularity"] = "uniform"
    """uniform over the catalogue, or proportional to (training count + 1) ** power."""
    count: int = 128
    """Negatives per token, drawn with replacement."""
    power: float = 0.75
    """popularity: 0 is uniform, 1 the plain counts."""
    logq: bool = False
    """Subtract log q from the scores of the positive and of the negatives."""


@dataclass(frozen=True, kw_only=True)
class TablesConfig:
    optimizer: Literal["adagrad", "lazy-adam", "adamw"] = "lazy-adam"
    """adagrad: row-wise, one accumulator per row. lazy-adam: Adam on touched rows. adamw: every row, every step."""
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """adamw only."""
    groups: int = 0
    """Groups of ranks: each holds a whole copy of the table, sharded inside the group. With as many groups as ranks
    every rank holds all of it. 0: that where the table with its optimizer takes less than 1 GiB, else a group per
    machine."""
    wire: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type in which rows and their gradients travel between the ranks of a group."""
    row_clip: float = 0.0
    """Largest norm of one row's gradient; 0 is off."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the rows as they are kept; updates are computed in fp32, and bf16 rows rounded up or down by chance."""


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    sharding: Literal["replicated", "fsdp"] = "replicated"
    """replicated: every rank holds the encoder. fsdp: parameters, gradients and moments are spread over all ranks and
    gathered block by block (torch's fully_shard), for encoders that outgrow a device."""
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 0.0
    """Largest global norm of the dense gradients; 0 is off."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    epochs: int = 10
    batch_users: int = 0
    """Users in a batch, of which a rank takes one per step; 0 fills batches by `batch_tokens` instead."""
    batch_tokens: int = 8192
    """Tokens in a batch (whole users; never more, unless one user alone is longer). Used where batch_users is 0."""
    accumulate: int = 1
    """Batches whose gradients are summed before one update."""
    rate: Literal["constant", "cosine"] = "constant"
    """Course of both learning rates after the warm-up; cosine ends at a tenth."""
    warmup_steps: int = 0
    seed: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast of the encoder, where the device has it."""
    evaluate_every: int = 1
    """Epochs between evaluations; 0 evaluates after the last only."""
    patience: int = 0
    """Stop when the metric has not improved for this many evaluations; 0 never stops early."""
    select_by: str = "ndcg@10"
    """The metric that names the best checkpoint and stops early."""
    select_on_test: bool = False
    """Select the best epoch on the test targets where the split has no validation (public tables do; it flatters)."""
    checkpoint_every: int = 0
    """Steps between checkpoints, beside the one at the end of every epoch; 0 is off."""
    keep_checkpoints: int = 2
    """Latest checkpoints kept, beside the best one."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a non-finite loss or gradient does: stop the run, or skip the update and count it."""


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    strategy: Literal["none", "token-aware", "global"] = "global"
    """How the users of a global step come to ranks. none: every rank takes a batch as it was drawn. token-aware:
    batches are filled to the same number of tokens, not of users. global: the batches of a step are pooled and dealt
    out again so that every rank has the same work; which users make up a step stays the same."""
    users: Literal["planned", "exchanged"] = "planned"
    """global: planned by every rank from the store's lengths, without a word between them; or exchanged, where every
    rank reads its own batch and the ranks swap users, as few tokens as balance needs (batches still come from a store
    that all ranks see)."""
    batches: int = 0
    """Batches (of train.batch_users or train.batch_tokens) in a global step; 0 takes one per rank. A run keeps it when
    it is resumed, so that its steps do not depend on the number of ranks."""
    rank_tokens: int = 0
    """Most tokens that a rank computes at once; what is dealt to it beyond that it computes in turns. 0: no limit."""
    weight: Literal["tokens", "samples"] = "tokens"
    """tokens: every token counts alike, whatever its rank. samples: every rank's mean over its tokens counts by its
    number of users, as the TurboGR paper weights its token-aware batches."""
    cost: Literal["flops", "measured"] = "flops"
    """What a user of L tokens costs: by the model's operations, or fitted to the measured times of recent steps (then
    the last bits of a run depend on its timing)."""
    window: int = 0
    """Users of more training tokens than this are cut into windows, rows of their own that see nothing of one another;
    0 cuts none."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    max_users: int = 0
    """Evaluate this many users, drawn by the seed; 0 takes all."""
    batch_users: int = 512
    item_chunk: int = 65536
    """Items scored at a time."""
    filter: Literal["visible", "history", "none"] = "visible"
    """What is removed from the ranking: the items that the model sees, of the whole history, or nothing."""


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    name: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    threads: int = 0
    """CPU threads of a rank; 0 shares the machine's cores among its ranks. Part of a run's identity: sums
    depend on it in the last bit."""
    gemm: Literal["auto", "mkl", "onednn"] = "auto"
    """Library of fp32 matrix products on a CPU; auto goes by the processor. Part of a run's identity, too."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    every: int = 10
    """Steps between progress lines (metrics.jsonl has every step)."""
    tensorboard: bool = True
    wandb: bool = False


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on."""

    data: DataConfig = field(default_factory=DataConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    negatives: NegativesConfig = field(default_factory=NegativesConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    log: LogConfig = field(default_factory=LogConfig)
