"""The shape of a run's configuration: every key, its type and its default. No torch, no file access.

Names are verl's wherever verl has the same thing, so that what people know carries over. Unknown keys are refused.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """A mapping in the YAML file; immutable once built, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """One text stands for a list of one; true and false are no numbers, although Python thinks so."""
        annotation = cls.model_fields[info.field_name].annotation
        if annotation == tuple[str, ...] and isinstance(value, str):
            return (value,)
        if isinstance(value, bool) and annotation in (int, float, int | None, float | None):
            raise ValueError("a number is wanted")
        return value


class ModelConfig(Section):
    """The Hugging Face checkpoint that the actor starts from."""

    path: str
    dtype: Dtype = "bfloat16"
    override_transformer_config: dict[str, Any] = Field(default_factory=dict)


class LayoutConfig(Section):
    """Parallel degrees of the actor under their Megatron names. Data parallelism is what remains of the world size."""

    world_size: int = Field(ge=1)
    tensor_model_parallel_size: int = Field(1, ge=1)
    pipeline_model_parallel_size: int = Field(1, ge=1)
    virtual_pipeline_model_parallel_size: int | None = Field(None, ge=1)
    context_parallel_size: int = Field(1, ge=1)
    expert_model_parallel_size: int = Field(1, ge=1)
    expert_tensor_parallel_size: int | None = Field(None, ge=1)  # None: 1
    sequence_parallel: bool | None = None  # None: on when TP > 1
    num_layers_in_first_pipeline_stage: int | None = Field(None, ge=1)
    num_layers_in_last_pipeline_stage: int | None = Field(None, ge=1)
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_layers: tuple[int, ...] | None = (
        None  # explicit layer count of each stage; with virtual stages of each chunk, in the order of the layers
    )


class OptimConfig(Section):
    """Adam under Megatron's distributed optimizer."""

    lr: float = Field(1e-6, gt=0)
    min_lr: float = Field(0.0, ge=0)
    lr_warmup_steps: int = Field(0, ge=0)  # optimizer steps
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_decay_steps: int | None = Field(None, ge=1)  # None: all optimizer steps of the run
    weight_decay: float = Field(0.1, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0)
    override_optimizer_config: dict[str, Any] = Field(default_factory=dict)


class ActorConfig(Section):
    """The trained model: layout, batches, optimizer, what moves to the host while it is not needed."""

    layout: LayoutConfig
    optim: OptimConfig = OptimConfig()
    ppo_mini_batch_size: int = Field(ge=1)  # prompts per optimizer step
    ppo_micro_batch_size_per_gpu: int = Field(8, ge=1)  # samples per forward-backward of one rank
    log_prob_micro_batch_size_per_gpu: int | None = Field(None, ge=1)  # None: cut as the update, which gives the same bits
    use_remove_padding: bool = True  # pack sequences end to end instead of padding them to one length
    use_dynamic_bsz: bool = False  # cut micro-batches by tokens instead of samples
    ppo_max_token_len_per_gpu: int | None = Field(None, ge=1)  # tokens of one device in a micro-batch, with use_dynamic_bsz
    log_prob_max_token_len_per_gpu: int | None = Field(None, ge=1)  # the same for log-probs; None: cut as the update
    param_offload: bool = False  # parameters are on the host while the engines generate
    grad_offload: bool = False
    optimizer_offload: bool = False
    router_replay: Literal["disabled", "R2", "R3"] = "disabled"  # experts chosen as the old log-probs (R2) or the engine (R3) chose
    freeze_router: bool = False  # routers stay as the checkpoint has them
    override_ddp_config: dict[str, Any] = Field(default_factory=dict)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The keys here that send something to the host."""
        return tuple(name for name in ("param_offload", "grad_offload", "optimizer_offload") if getattr(self, name))


class RefConfig(Section):
    """The reference model of a KL loss. It lies as the actor does unless it has a layout of its own."""

    path: str | None = None  # of another checkpoint of the same architecture; None: the model's
    layout: LayoutConfig | None = None
    param_offload: bool = False
    log_prob_micro_batch_size_per_gpu: int | None = Field(None, ge=1)  # None: the actor's
    log_prob_use_dynamic_bsz: bool | None = None  # None: the actor's use_dynamic_bsz
    log_prob_max_token_len_per_gpu: int | None = Field(None, ge=1)  # None: the actor's


class CustomLossConfig(Section):
    """A user's loss: the Python file at `path` binds a function to `loss_mode` with @register_loss; what holds for it stands here."""

    path: str
    aggregations: tuple[str, ...] = ()  # those it may be combined with; none named: all
    parameters: dict[str, float] = Field(default_factory=dict)  # its constants, as parameters.custom


class PolicyLossConfig(Section):
    """Policy loss; names and allowed pairs stand in mrl/algo/spec.py."""

    loss_mode: str = "gspo"
    custom: CustomLossConfig | None = None
    loss_agg_mode: str = "seq-mean-token-mean"
    clip_ratio_low: float = Field(3e-4, ge=0)
    clip_ratio_high: float = Field(4e-4, ge=0)
    clip_ratio_c: float = Field(10.0, gt=1)  # dual clip, of the losses that have one
    loss_scale_factor: float | None = Field(None, gt=0)  # of seq-mean-token-sum-norm; None: data.max_response_length
    tau_pos: float = Field(1.0, gt=0)  # sapo: temperature of the gate where the advantage is positive
    tau_neg: float = Field(1.05, gt=0)  # sapo: elsewhere
    clip_cov_ratio: float = Field(2e-4, ge=0, le=1)  # clip_cov: share of tokens left out
    clip_cov_lb: float = 1.0  # clip_cov: covariance that a token must exceed
    clip_cov_ub: float = 5.0  # clip_cov: and stay below
    kl_cov_ratio: float = Field(2e-4, ge=0, le=1)  # kl_cov: share of tokens that are penalised
    ppo_kl_coef: float = Field(0.1, ge=0)  # kl_cov: weight of the penalty
    force: bool = False  # accept a pair that is refused as a likely mistake


class RolloutCorrectionConfig(Section):
    """Weights or rejections for the gap between generation's and training's probabilities; named points in mrl/algo/spec.py."""

    level: str | None = None  # token, sequence or geometric; None: no correction
    mode: str = "truncate"  # mask, clip or truncate
    low: float | None = Field(None, ge=0)  # of the ratio training / generation; None: no lower bound
    high: float = Field(2.0, gt=0)


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): groups whose responses all have the same value are replaced by new prompts."""

    enable: bool = False
    metric: str = "score"  # score: as the reward function gave it; reward: after penalties; else a part of the reward by name
    max_num_gen_batches: int = Field(0, ge=0)  # batches of prompts generated for one step; 0: without end
    on_exhausted: Literal["error", "partial", "unfiltered"] = "error"  # partial: train on what there is; unfiltered: fill up


class OverlongBufferConfig(Section):
    """Soft overlong penalty (DAPO): from 0 at data.max_response_length - len tokens down to -penalty_factor at max_response_length."""

    enable: bool = False
    len: int | None = Field(None, ge=1)  # tokens; None: a fifth of data.max_response_length, as in the paper
    penalty_factor: float = Field(1.0, ge=0)


class KlControlConfig(Section):
    """KL in the reward."""

    kl_coef: float = Field(1e-3, ge=0)


class AlgorithmConfig(Section):
    """Advantage and loss."""

    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    gdpo_reward_keys: tuple[str, ...] = ()  # gdpo: parts of the reward, by name
    gdpo_reward_weights: tuple[float, ...] = ()  # gdpo: one each; none given: all 1
    anchor: str = "recompute"  # whose log-probs the trust region starts from: recompute (the trainer's) or rollout (generation's)
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    overlong_filter: bool = False  # responses that were cut off at the length limit are not trained on
    use_kl_in_reward: bool = False
    kl_penalty: str = "kl"  # estimator of the KL in the reward
    kl_ctrl: KlControlConfig = KlControlConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = Field(0.0, ge=0)
    kl_loss_type: str = "low_var_kl"

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a reference model are needed."""
        return self.use_kl_loss or self.use_kl_in_reward


class ValSamplingConfig(Section):
    """Sampling of validation responses."""

    n: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1


class RolloutConfig(Section):
    """Groups of vLLM engines."""

    name: Literal["vllm"] = "vllm"
    num_engines: int = Field(1, ge=1)
    tensor_model_parallel_size: int = Field(1, ge=1)
    data_parallel_size: int = Field(1, ge=1)
    expert_parallel_size: int = Field(1, ge=1)
    dtype: Dtype | None = None  # None: the model's
    n: int = Field(8, ge=1)  # responses per prompt
    temperature: float = Field(1.0, ge=0.01)  # vLLM would silently raise a lower one to 0.01
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    gpu_memory_utilization: float = Field(0.8, gt=0, le=1)
    cpu_kvcache_gib: int = Field(1, ge=1)  # KV cache of one engine on CPU, GiB
    max_num_seqs: int = Field(256, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=1)
    enforce_eager: bool | None = None  # None: as the device has it
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool | None = None  # None: as the device has it
    calculate_log_probs: bool = True
    start_timeout_s: float = Field(900.0, gt=0)
    generate_timeout_s: float = Field(3600.0, gt=0)
    engine_kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    val_kwargs: ValSamplingConfig = ValSamplingConfig()


class DataConfig(Section):
    """Prompts, in verl's schema."""

    train_files: tuple[str, ...] = ()
    train_weights: tuple[float, ...] = ()  # of each of train_files, its share of an epoch's prompts; none given: every prompt once
    val_files: tuple[str, ...] = ()
    prompt_key: str = "prompt"
    train_batch_size: int = Field(ge=1)  # prompts per step
    gen_batch_size: int | None = Field(None, ge=1)  # prompts generated at a time by dynamic sampling; None: train_batch_size
    val_max_samples: int | None = Field(None, ge=1)
    max_prompt_length: int = Field(1024, ge=1)  # tokens
    max_response_length: int = Field(1024, ge=1)  # tokens
    filter_overlong_prompts: bool = True
    truncation: Literal["error", "left", "right", "middle"] = "error"
    max_bad_row_share: float = Field(0.01, ge=0, le=1)  # more bad rows than this share stop the run
    shuffle: bool = True
    drop_duplicates: bool = True  # of rows with the same prompt only the first is kept
    enable_thinking: bool | None = None  # the chat template's switch; None: as the template has it
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class CustomRewardConfig(Section):
    """A user's reward function: `name` in the Python file at `path`, with verl's compute_score signature."""

    path: str
    name: str = "compute_score"
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)


class RewardConfig(Section):
    """Scoring of responses, in worker processes that are killed and replaced when they hang."""

    function: str = "auto"  # a built-in rule by name; auto: by the row's data_source
    reward_manager: Literal["naive", "dapo"] | None = None  # verl's names: dapo goes with algorithm.overlong_buffer, naive without
    bonus_rules: dict[str, float] = Field(default_factory=dict)  # further built-in rules, and the weight of each in the sum
    custom_reward_function: CustomRewardConfig | None = None
    num_workers: int = Field(2, ge=1)
    timeout_s: float = Field(10.0, gt=0)  # one deadline for the whole scoring of one sample
    max_memory_gib: float | None = Field(16.0, gt=0)  # address space of one scoring process; None: unlimited
    failure_score: float | None = None  # of a sample whose reward failed; None: the lowest of its data source in the batch, at most 0
    max_failure_share: float = Field(0.2, ge=0, le=1)  # more failures than this share of one step stop the run


class TrainerConfig(Section):
    """The loop: how long, how often, where to."""

    experiment_name: str = "default"
    run_dir: str | None = None  # None: runs/<experiment_name>
    seed: int = 0
    deterministic: bool = False  # the actor's ranks use deterministic kernels only, so that a resumed run repeats bit by bit
    total_epochs: int = Field(1, ge=1)
    total_training_steps: int | None = Field(None, ge=1)  # None: total_epochs over the data
    save_freq: int = -1  # steps; -1: only at the end
    test_freq: int = -1  # steps; -1: never
    val_before_train: bool = True
    log_val_generations: int = Field(0, ge=0)  # validation responses shown by the loggers that show text; all are saved in any case
    max_actor_ckpt_to_keep: int = Field(2, ge=1)
    async_save: bool = True  # write checkpoints while training goes on, from a copy in host memory; false: training waits
    max_skipped_updates: int = Field(3, ge=1)  # so many updates in a row that could not be applied (NaN, inf) stop the run, exit code 6
    logger: tuple[str, ...] = ("console", "tensorboard")
    logger_timeout_s: float = Field(60.0, gt=0)  # a logger that is busy with one step for longer is left out from then on
    project_name: str = "mrl"  # under which hosted loggers file the run; its name there is experiment_name


class ClusterConfig(Section):
    """Where it runs."""

    device: Literal["cpu", "cuda", "npu"] = "cuda"
    nnodes: int = Field(1, ge=1)
    n_gpus_per_node: int = Field(1, ge=1)  # devices; on cpu: ranks
    accelerator: str | None = None  # a device of mrl's table, such as h100-80g, that plans are made for; None: the smallest of `device`
    versions: dict[str, str] = Field(default_factory=dict)  # package -> version, where it is not the tested row's
    placement: Literal["separate", "colocated"] = "separate"
    cpus_per_actor: float = Field(1.0, gt=0)
    cpus_per_engine: float = Field(1.0, gt=0)
    address: str | None = None  # of a running Ray cluster; None: $RAY_ADDRESS, else one is started for the run
    port: int | None = Field(None, ge=1024, le=65535)  # where the actor's ranks meet, on the host of rank 0; None: a free one
    start_timeout_s: float = Field(600.0, gt=0)
    step_timeout_s: float = Field(3600.0, gt=0)  # longest wait for one call to the actor's ranks


class ReshardConfig(Section):
    """How trained weights reach the engines."""

    path: Literal["fast", "slow"] = "fast"  # fast: shard to shard by a plan; slow: full tensors through vLLM's own loader
    transport: Literal["auto", "shm", "p2p", "ipc"] = "auto"  # auto: the nearest that connects a pair; p2p: torch.distributed
    budget_mb: int = Field(256, ge=1)  # MiB that one rank sends, or one worker receives, in a round; staging is twice that
    verify_every: int = Field(1, ge=1)  # syncs; how often what an engine finally holds is read back (what it received: always)
    timeout_s: float = Field(300.0, gt=0)  # longest wait for one peer


class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    actor: ActorConfig
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    reshard: ReshardConfig = ReshardConfig()

    @property
    def rollout_dtype(self) -> str:
        """Number format of the engines' weights: rollout.dtype, else the model's."""
        return self.rollout.dtype or self.model.dtype

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps on the responses of one training step."""
        return -(-self.data.train_batch_size // self.actor.ppo_mini_batch_size)

    @property
    def total_updates(self) -> int | None:
        """Optimizer steps of the whole run, None when its length is given in epochs."""
        steps = self.trainer.total_training_steps
        return None if steps is None else steps * self.updates_per_step


def leaf(config: BaseModel, field: str) -> Any:
    """The value of a dotted key; None where the path ends early."""
    value: Any = config
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value
