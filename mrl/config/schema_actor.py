"""Keys of the trained model and of its reference: checkpoint, layout, optimizer, batches, offload."""

from typing import Any, Literal

from mrl.algo.spec import AGGREGATIONS, ALIASES
from mrl.config.section import Section, key, known_name, section_from
from mrl.model.adapters import ALL_LINEAR, TARGETS, Lora
from mrl.model.layout_degrees import LayoutDegrees

Dtype = Literal["float32", "bfloat16"]
# what of the actor may leave its device
PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
# and the key that says so
SWITCHES = {PARAMETERS: "param_offload", GRADIENTS: "grad_offload", OPTIMIZER: "optimizer_offload"}


class ModelConfig(Section):
    """The Hugging Face checkpoint that the actor starts from."""

    path: str = key(
        ...,
        "Hugging Face checkpoint that the actor and the engines start from: a folder, or a name on the hub (ORG/NAME "
        "of a model that is known here, hf://ORG/NAME of any; @REVISION may follow), which each node then has in its "
        "cache.",
        advice="A folder on storage that every node sees. With a name, nodes that share no cache (HF_HOME) each "
        "download it while they start: raise cluster.start_timeout_s and rollout.start_timeout_s.",
        verl="actor_rollout_ref.model.path",
        is_path=True,
    )
    dtype: Dtype = key(
        "bfloat16",
        "Number format of weights and activations in training; optimizer state and master weights are always float32.",
        advice="bfloat16 everywhere but on a CPU.",
    )
    override_transformer_config: dict[str, Any] = key(
        {},
        "Fields of Megatron's TransformerConfig that no key here has, under their own names. What "
        "would make the actor another model than the engines' may only say what the model has anyway.",
        advice="MoE on accelerators: moe_router_dtype: fp32, moe_permute_fusion: true. When memory is "
        "short: recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1.",
    )
    allow_torch_layers: bool = key(
        False,
        "Whether ranks on an accelerator may compute in plain torch where Megatron finds no Transformer Engine; `mrl "
        "plan` then counts with that.",
        advice="false, which ends such a run at its start: experts one by one, nothing fused, more memory. "
        "On a CPU it is always so.",
    )


class LayoutConfig(section_from(LayoutDegrees)):
    """Parallel degrees of the actor under their Megatron names. Data parallelism is what remains of the world size."""


class OptimConfig(Section):
    """Adam under Megatron's distributed optimizer."""

    lr: float = key(
        1e-6,
        "Peak learning rate.",
        gt=0,
        advice="Start at 1e-6; 1e-5 is the most that full-parameter RL of large models usually takes.",
        verl="actor_rollout_ref.actor.optim.lr",
    )
    min_lr: float = key(0.0, "Where the decay ends.", ge=0, verl="actor_rollout_ref.actor.optim.min_lr")
    lr_warmup_steps: int = key(
        0,
        "Updates until the peak is reached.",
        ge=0,
        unit="updates",
        advice="About 10; without it the first updates are the largest.",
    )
    lr_decay_style: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "How the rate goes from peak to minimum.",
        verl=(
            "actor_rollout_ref.actor.optim.lr_decay_style",
            "actor_rollout_ref.actor.optim.lr_scheduler_type",
            "actor_rollout_ref.actor.optim.warmup_style",
        ),
    )
    lr_decay_steps: int | None = key(
        None,
        "Updates until the minimum; left out: all of the run.",
        ge=1,
        unit="updates",
    )
    weight_decay: float = key(
        0.1,
        "Decoupled weight decay.",
        ge=0,
        advice="0.1.",
        verl="actor_rollout_ref.actor.optim.weight_decay",
    )
    betas: tuple[float, float] = key(
        (0.9, 0.95),
        "Adam's moment decays.",
        verl="actor_rollout_ref.actor.optim.betas",
    )
    eps: float = key(1e-8, "Adam's epsilon.", gt=0)
    clip_grad: float = key(
        1.0,
        "Gradient norm above which gradients are scaled down; 0: never.",
        ge=0,
        advice="1.",
        verl=("actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.clip_grad"),
    )
    override_optimizer_config: dict[str, Any] = key(
        {},
        "Fields of Megatron's OptimizerConfig that no key here has.",
        advice="A model whose optimizer state does not fit: optimizer_cpu_offload: true, "
        "optimizer_offload_fraction: 1, overlap_cpu_optimizer_d2h_h2d: true, "
        "use_precision_aware_optimizer: true.",
    )


class LoraConfig(Section):
    """Low-rank adapters (LoRA) that are trained in the weights' place. Engines get the weights that both make."""

    rank: int = key(
        0,
        "Rank of the two factors that each targeted weight gets; 0: no adapters, all weights are trained.",
        ge=0,
        advice="8 to 64. Weights stay as the checkpoint has them, so gradients, optimizer and checkpoints are small; "
        "the learning rate wants to be about ten times that of full training.",
    )
    alpha: float = key(
        16.0,
        "The product of both factors counts alpha / rank times.",
        gt=0,
        advice="The rank, or twice that.",
    )
    target_modules: tuple[str, ...] = key(
        (ALL_LINEAR,),
        f"The modules that get adapters, by the ends of their names in the checkpoint: {', '.join(TARGETS)}, or "
        f"{ALL_LINEAR}. Every expert has a pair of its own.",
        advice=f"{ALL_LINEAR}.",
        rule=known_name((ALL_LINEAR, *TARGETS), {}),
    )
    dropout: float = key(
        0.0,
        "Share of each adapter's input that is left out of an update at random, the rest scaled up for it.",
        ge=0,
        lt=1,
        advice="0. Above it an update's log-probs are not those of engines, and the ratio of a step's first update is "
        "not 1.",
    )
    base_dtype: Literal["model.dtype", "int8", "nf4"] = key(
        "model.dtype",
        "Number format of the weights under the adapters. int8 and nf4 are refused: no library that is kept here has "
        "products with such weights for Megatron's cut and grouped layers.",
        advice="model.dtype.",
    )
    path: str | None = key(
        None,
        "Folder of an adapter in PEFT's form that training starts from; left out: A random, B zero. A resumed run goes "
        "on from its checkpoint, and needs the folder no more.",
        advice="On storage that every node sees.",
        is_path=True,
    )

    @property
    def adapters(self) -> Lora | None:
        """What adapters the model has; None where all weights are trained."""
        if not self.rank:
            return None
        return Lora.of(self.rank, self.alpha, self.target_modules)


class ActorConfig(Section):
    """The trained model: layout, batches, optimizer, what moves to the host while it is not needed."""

    layout: LayoutConfig
    optim: OptimConfig = OptimConfig()
    lora: LoraConfig = LoraConfig()
    ppo_mini_batch_size: int = key(
        ...,
        "Prompts per optimizer update. train_batch_size / this = updates per step.",
        ge=1,
        unit="prompts",
        advice="More than one update a step is off-policy: watch actor/pg_clipfrac and actor/ppo_kl. "
        "2 to 4 updates are usual.",
        verl="actor_rollout_ref.actor.ppo_mini_batch_size",
    )
    ppo_micro_batch_size_per_gpu: int = key(
        8,
        "Samples in one forward-backward of one data-parallel rank.",
        ge=1,
        unit="samples",
        advice="As large as memory allows; it changes speed and memory, never the gradient.",
        verl="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples in one forward pass for log-probs; left out: cut as the update.",
        ge=1,
        unit="samples",
        advice="Left out, the first update's ratio is exactly 1. Larger is faster: there is no backward pass.",
        verl="actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    )
    use_remove_padding: bool = key(
        True,
        "Samples of a micro-batch are packed one after the other instead of padded to one length.",
        advice="true: padding is computed like text; packing changes results by rounding only.",
    )
    use_dynamic_bsz: bool = key(
        False,
        "Cuts micro-batches by tokens instead of samples.",
        advice="Worth it whenever lengths differ: less padding, a steadier peak of memory.",
        verl="actor_rollout_ref.actor.use_dynamic_bsz",
    )
    ppo_max_token_len_per_gpu: int | None = key(
        None,
        "Tokens of one device in a micro-batch, with use_dynamic_bsz.",
        ge=1,
        unit="tokens",
        advice="At least (max_prompt_length + max_response_length) / context parallelism, so that the "
        "longest sample fits; 2 to 3 times that where memory allows.",
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "The same for log-probs; left out: as in training.",
        ge=1,
        unit="tokens",
    )
    param_offload: bool = key(
        False,
        "Parameters are on the host while the engines generate.",
        advice="For colocated placement, when memory is short.",
        verl=("actor_rollout_ref.actor.fsdp_config.param_offload", "actor_rollout_ref.actor.megatron.param_offload"),
    )
    grad_offload: bool = key(
        False,
        "Gradient buffers have no memory but in updates; they are made anew, as zeros.",
        verl="actor_rollout_ref.actor.megatron.grad_offload",
    )
    optimizer_offload: bool = key(
        False,
        "Float32 weights and moments are on the host but in updates and saves; with placement colocated they come "
        "back while log-probs are computed, where the plan has room for both.",
        verl=(
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
            "actor_rollout_ref.actor.megatron.optimizer_offload",
        ),
    )
    router_replay: Literal["disabled", "R2", "R3"] = key(
        "disabled",
        "Training uses the experts that were chosen before: R2 when old log-probs were computed, R3 "
        "when the engine generated.",
        advice="disabled for one update a step; R2 for two; R3 for four or more, or when router/drift is "
        "high. GSPO often needs none.",
        verl=("actor_rollout_ref.actor.router_replay.mode", "actor_rollout_ref.actor.megatron.router_replay.mode"),
    )
    max_unrouted_share: float = key(
        0.5,
        "With router_replay R3, a step of which a larger share of the responses came without any route, or all did, "
        "ends the run with exit code 4 before it is trained on.",
        ge=0,
        le=1,
        advice="Single tokens without a route, as those of cached prompts, are counted by router/missing_routes; a "
        "whole response without one is a fault of its engine.",
    )
    freeze_router: bool = key(
        False,
        "Routers stay as the checkpoint has them: no gradient, no decay.",
        advice="A last resort when router/drift or router/max_violation grows although routes are replayed.",
        verl="actor_rollout_ref.actor.megatron.freeze_moe_router",
    )
    override_ddp_config: dict[str, Any] = key(
        {},
        "Fields of Megatron's DistributedDataParallelConfig.",
        advice="Replicas over a network: overlap_grad_reduce: true sums gradients beside the backward of the last "
        "micro-batch, overlap_param_gather: true gathers updated weights beside the next forward. "
        "grad_reduce_in_fp32: false halves gradients, and rounds their sums to 16 bits.",
    )

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The keys here that send something to the host."""
        return tuple(name for name in SWITCHES.values() if getattr(self, name))


class RefConfig(Section):
    """The reference model of a KL loss. It lies as the actor does unless it has a layout of its own."""

    path: str | None = key(
        None,
        "Checkpoint of the reference model, of the actor's architecture; left out: the actor's start (model.path).",
        is_path=True,
    )
    layout: LayoutConfig | None = None
    param_offload: bool = key(
        False,
        "The reference model's parameters are on the host when it is not asked.",
        advice="As the actor has it.",
        verl="actor_rollout_ref.ref.fsdp_config.param_offload",
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples in one forward pass of the reference model; left out: the actor's.",
        ge=1,
        unit="samples",
        verl="actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    )
    log_prob_use_dynamic_bsz: bool | None = key(
        None,
        "Cuts its micro-batches by tokens; left out: as the actor.",
        verl="actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "Tokens of one device in its micro-batches; left out: the actor's.",
        ge=1,
        unit="tokens",
    )


class CriticOptimConfig(OptimConfig):
    """Adam of the critic."""

    lr: float = key(
        1e-5,
        "Peak learning rate of the critic.",
        gt=0,
        advice="About ten times the actor's: its head begins at zero.",
    )


class CriticConfig(Section):
    """The value model of algorithm.adv_estimator: gae, on the actor's ranks. It is the actor's architecture with one
    number a token in place of the output layer. `layout` has the keys of actor.layout; it then lies in process groups
    of its own. Left out, it lies as the actor, in the same groups.
    """

    path: str | None = key(
        None,
        "Checkpoint that the critic starts from, of the actor's architecture; left out: the actor's start "
        "(model.path). Its head starts at zero.",
        is_path=True,
    )
    layout: LayoutConfig | None = None
    optim: CriticOptimConfig = CriticOptimConfig()
    ppo_mini_batch_size: int | None = key(
        None,
        "Prompts per update of the critic; left out: the actor's.",
        ge=1,
        unit="prompts",
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples in one forward-backward of the critic on one data-parallel rank; left out: the actor's.",
        ge=1,
        unit="samples",
    )
    forward_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples in one forward pass for values; left out: cut as the critic's update.",
        ge=1,
        unit="samples",
    )
    ppo_max_token_len_per_gpu: int | None = key(
        None,
        "Tokens of one device in a micro-batch of the critic, with actor.use_dynamic_bsz; left out: the actor's.",
        ge=1,
        unit="tokens",
    )
    forward_max_token_len_per_gpu: int | None = key(
        None,
        "The same for values; left out: as in the critic's update.",
        ge=1,
        unit="tokens",
    )
    cliprange_value: float = key(
        0.5,
        "How far a value may move from what it was before the step until its loss is clipped.",
        gt=0,
        advice="0.5, or the spread of rewards where that is far from 1.",
    )
    loss_agg_mode: str = key(
        "token-mean",
        "How squared errors of tokens become one number.",
        advice="token-mean.",
        rule=known_name([name for name, each in AGGREGATIONS.items() if not each.needs_scale_factor], ALIASES),
    )
    param_offload: bool = key(
        False,
        "The critic's parameters are on the host but while it computes.",
        advice="For colocated placement, as the actor has it.",
    )
    grad_offload: bool = key(
        False,
        "Its gradient buffers have no memory but in its updates.",
    )
    optimizer_offload: bool = key(
        False,
        "Its float32 weights and moments are on the host but in its updates and in saves.",
    )

    def as_actor(self, actor: ActorConfig) -> ActorConfig:
        """The critic's section in the shape of the actor's, with the actor's values where it has none of its own."""
        together = {"override_optimizer_config": actor.optim.override_optimizer_config}
        own = {
            "layout": self.layout,
            "ppo_mini_batch_size": self.ppo_mini_batch_size,
            "ppo_micro_batch_size_per_gpu": self.ppo_micro_batch_size_per_gpu,
            "ppo_max_token_len_per_gpu": self.ppo_max_token_len_per_gpu,
        }
        always = {
            "optim": self.optim.model_copy(update=together),
            "lora": LoraConfig(),
            "router_replay": "disabled",
            "freeze_router": False,
            "log_prob_micro_batch_size_per_gpu": self.forward_micro_batch_size_per_gpu,
            "log_prob_max_token_len_per_gpu": self.forward_max_token_len_per_gpu,
        }
        switches = {name: getattr(self, name) for name in SWITCHES.values()}
        given = {name: value for name, value in own.items() if value is not None}
        return actor.model_copy(update=given | always | switches)
