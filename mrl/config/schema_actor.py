"""Keys of the trained model, its reference model and its critic: checkpoint, layout, optimizer, batches, offload."""

from typing import Any, Literal

from mrl.algo.spec import AGGREGATIONS, ALIASES
from mrl.config.section import Section, key, known_name, must_be, section_from
from mrl.model.adapters import ALL_LINEAR, TARGETS, Lora
from mrl.model.layout_degrees import LayoutDegrees

Dtype = Literal["float32", "bfloat16"]
# parts of the actor that can leave its device
PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
# the key that moves each part to the host
SWITCHES = {PARAMETERS: "param_offload", GRADIENTS: "grad_offload", OPTIMIZER: "optimizer_offload"}


class ModelConfig(Section):
    """The Hugging Face checkpoint that the actor starts from."""

    path: str = key(
        ...,
        "Hugging Face checkpoint that the actor and the engines start from. Either a folder, or a name on the "
        "hub: ORG/NAME of a model that is known here, or hf://ORG/NAME of any. @REVISION may follow. Each "
        "node then keeps the model in its cache.",
        advice="A folder on storage that every node sees. With a name on the hub, each node without a shared cache "
        "(HF_HOME) downloads the model at its start. Then raise cluster.start_timeout_s and "
        "rollout.start_timeout_s.",
        verl="actor_rollout_ref.model.path",
        is_path=True,
    )
    dtype: Dtype = key(
        "bfloat16",
        "Number format of weights and activations in training. Optimizer state and master weights are always float32.",
        advice="bfloat16, except on a CPU.",
    )
    max_position_embeddings: int | None = key(
        None,
        "Positions that the model is run with, in place of those of its config.json; left out: those. Angles of heads "
        "do not change, so only for rope_type default, linear and llama3. Exported folders keep their own number.",
        ge=1,
        le=2**30,
        unit="tokens",
        advice="Left out. More than the checkpoint says where samples are longer than it was trained with: the model "
        "has to learn them.",
    )
    vision: Literal["frozen", "trained", "projector"] | None = key(
        None,
        "What becomes of the vision tower of a model that reads images (Qwen2.5-VL, Qwen3-VL, Qwen3.5). frozen: "
        "prompts may have images; the text model is trained, and the tower stays as it is. trained: the tower, too, "
        "is trained, saved and sent to the engines. projector: of the tower only what makes tokens of patches is "
        "trained. null: the text model alone is loaded, and rows with images are bad rows.",
        advice="frozen for data with images; a tower that is trained takes one more forward and one backward an image "
        "and update, and its optimizer state. null otherwise: it takes no memory and no time.",
    )
    override_transformer_config: dict[str, Any] = key(
        {},
        "Fields of Megatron's TransformerConfig that have no key here, under Megatron's names. Fields that "
        "define the model itself must equal what its checkpoint says: otherwise actor and engines would "
        "differ.",
        advice="MoE on accelerators: moe_router_dtype: fp32, moe_permute_fusion: true. When memory is "
        "short: recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1.",
    )
    allow_torch_layers: bool = key(
        False,
        "Lets ranks on an accelerator compute in plain torch where Megatron finds no Transformer Engine. `mrl "
        "plan` then counts with that.",
        advice="false: without Transformer Engine a run ends at its start. Plain torch computes experts one by one, "
        "fuses nothing and takes more memory. On a CPU it is always used.",
    )
    grouped_gemm: Literal["cublas", "cutlass"] = key(
        "cublas",
        "How Transformer Engine multiplies the tokens of a rank's experts. cublas: one product an expert. cutlass: "
        "one kernel for all, on Hopper; gradients of weights stay products of cublas, summed in float32.",
        advice="cublas, until the check `grouped_parity` of `scripts/hardware` has held cutlass against Hugging Face "
        "on your device, also where no expert of a rank gets a token. It made an update of small micro-batches 1.55 "
        "times as fast on one H100. NVTE_USE_CUTLASS_GROUPED_GEMM of a process's environment overrides the key.",
    )
    gated_delta: Literal["torch", "fla"] = key(
        "torch",
        "Kernel of gated delta layers (Qwen3-Next, Qwen3.5). torch: mrl's own, in plain torch. fla: the chunked kernel "
        "of flash-linear-attention, which the cuda row brings.",
        advice="fla where the package is installed and a check on your device held it against torch: plain torch "
        "launches every 64 tokens of a sequence by themselves, which `mrl plan` counts.",
    )


class LayoutConfig(section_from(LayoutDegrees)):
    """Parallel degrees of the actor, under their Megatron names. Data parallelism fills the rest of the world size."""


# keys that say more of a degree, and mean nothing beside another one
_OF_DEGREE = {
    "tensor_model_parallel_size": ("sequence_parallel",),
    "pipeline_model_parallel_size": (
        "virtual_pipeline_model_parallel_size",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "pipeline_layers",
    ),
}


class OtherLayoutConfig(LayoutConfig):
    """What differs from actor.layout for a second model on the actor's ranks."""

    world_size: int | None = key(None, "The actor's ranks, and no others.", ge=1)

    def beside(self, actor: LayoutConfig) -> "OtherLayoutConfig":
        """Returns the whole layout: keys that are left out have the actor's values.

        How layers lie in stages is one thing: where a key of it is named, the others are not taken from the actor; nor
        is sequence_parallel beside another tensor degree.
        """
        named = self.model_fields_set
        left_out = set(type(self).model_fields) - named
        for degree, more in _OF_DEGREE.items():
            if named & {degree, *more}:
                left_out -= set(more)
        return self.model_copy(update={name: getattr(actor, name) for name in left_out})


def _are_decays(betas: tuple[float, float]) -> bool:
    return all(0 <= beta < 1 for beta in betas)


class OptimConfig(Section):
    """Adam under Megatron's distributed optimizer."""

    lr: float = key(
        1e-6,
        "Peak learning rate.",
        gt=0,
        advice="Start at 1e-6. Full-parameter RL of large models seldom takes more than 1e-5.",
        verl="actor_rollout_ref.actor.optim.lr",
    )
    min_lr: float = key(
        0.0,
        "Learning rate at the end of the decay.",
        ge=0,
        verl=("actor_rollout_ref.actor.optim.min_lr", "actor_rollout_ref.actor.optim.lr_min"),
    )
    vision_lr: float | None = key(
        None,
        "Peak learning rate of a vision tower that is trained (model.vision: trained, projector). It rises and falls "
        "as lr does. null: lr.",
        gt=0,
    )
    lr_warmup_steps: int = key(
        0,
        "Updates in which the learning rate rises from lr_warmup_init to its peak.",
        ge=0,
        unit="updates",
        advice="About 10; without it the first updates are the largest.",
    )
    lr_warmup_steps_ratio: float = key(
        0.0,
        "The same as a share of lr_decay_steps, or of all updates of the run where that is left out; for "
        "lr_warmup_steps 0.",
        ge=0,
        lt=1,
        advice="0: a warm-up of a known number of updates does not change with the length of the run.",
    )
    lr_warmup_init: float = key(
        0.0,
        "Learning rate that a warm-up rises from.",
        ge=0,
        verl=("actor_rollout_ref.actor.optim.lr_warmup_init", "actor_rollout_ref.actor.optim.lr_start"),
    )
    lr_decay_style: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "How the learning rate falls from its peak to min_lr.",
        verl=(
            "actor_rollout_ref.actor.optim.lr_decay_style",
            "actor_rollout_ref.actor.optim.lr_scheduler_type",
            "actor_rollout_ref.actor.optim.warmup_style",
        ),
    )
    lr_decay_steps: int | None = key(
        None,
        "Updates until the learning rate reaches min_lr; left out: all updates of the run.",
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
        "Decay rates of Adam's first and second moment.",
        rule=must_be(_are_decays, "must both be at least 0 and below 1", "Adam divides by 1 - beta^step", [0.9, 0.95]),
        verl="actor_rollout_ref.actor.optim.betas",
    )
    eps: float = key(1e-8, "Adam's epsilon.", gt=0, verl="actor_rollout_ref.actor.optim.eps")
    clip_grad: float = key(
        1.0,
        "Gradients are scaled down where their norm exceeds this; 0: never.",
        ge=0,
        advice="1.",
        verl=("actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.clip_grad"),
    )
    override_optimizer_config: dict[str, Any] = key(
        {},
        "Fields of Megatron's OptimizerConfig that have no key here.",
        advice="For a model whose optimizer state does not fit: optimizer_cpu_offload: true, "
        "optimizer_offload_fraction: 1, overlap_cpu_optimizer_d2h_h2d: true, use_precision_aware_optimizer: "
        "true.",
    )


class LoraConfig(Section):
    """Low-rank adapters (LoRA), trained in place of the weights. Engines get weights with the adapters merged in."""

    rank: int = key(
        0,
        "Rank of the two factors that each targeted weight gets; 0: no adapters, all weights are trained.",
        ge=0,
        advice="8 to 64. The weights themselves stay unchanged, so gradients, optimizer state and checkpoints are "
        "small. Use about ten times the learning rate of full training.",
    )
    alpha: float = key(
        16.0,
        "The product of the two factors is scaled by alpha / rank.",
        gt=0,
        advice="The rank, or twice the rank.",
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
        "Share of an adapter's input that an update drops at random. The rest is scaled up to make up for it.",
        ge=0,
        lt=1,
        advice="0. With more, log-probs in an update differ from the engines'. The ratio of a step's first update is "
        "then not 1.",
    )
    base_dtype: Literal["model.dtype", "int8", "nf4"] = key(
        "model.dtype",
        "Number format of the weights under the adapters. int8 and nf4 are refused: no supported library "
        "multiplies with such weights in Megatron's sharded and grouped layers.",
        advice="model.dtype.",
    )
    path: str | None = key(
        None,
        "Folder of an adapter in PEFT's format that training starts from; left out: A is random, B is zero. A "
        "resumed run reads its checkpoint and no longer needs the folder.",
        advice="A folder on storage that every node sees.",
        is_path=True,
    )

    @property
    def adapters(self) -> Lora | None:
        """The adapters of the model, or None where all weights are trained."""
        if not self.rank:
            return None
        return Lora.of(self.rank, self.alpha, self.target_modules)


class MtpConfig(Section):
    """The checkpoint's layer for multi-token prediction, which drafts with rollout.speculation.method: mtp.

    Every weight sync brings it to the engines, which multiply with the trained embedding and output layer.
    """

    train: bool = key(
        False,
        "Trains the layer along: its cross entropy on sampled tokens, by an optimizer of its own with the settings of "
        "actor.optim. The policy's update keeps its bits. false: the layer stays as it came.",
        advice="true for more than some hundred updates: watch drafts/acceptance, which falls as the policy moves away "
        "from the checkpoint. It costs one more layer's forward and backward a micro-batch.",
    )
    loss_weight: float = key(
        0.1,
        "Factor of the layer's loss. Adam divides it out, except where gradients are clipped or below its eps.",
        gt=0,
    )


class ActorConfig(Section):
    """The trained model: layout, batches, optimizer, and the parts that move to the host while idle."""

    layout: LayoutConfig
    optim: OptimConfig = OptimConfig()
    lora: LoraConfig = LoraConfig()
    mtp: MtpConfig = MtpConfig()
    ppo_mini_batch_size: int = key(
        ...,
        "Prompts per optimizer update. An epoch of a step makes train_batch_size / ppo_mini_batch_size updates.",
        ge=1,
        unit="prompts",
        advice="2 to 4 updates a step are usual. More than one update a step is off-policy: watch actor/pg_clipfrac "
        "and actor/ppo_kl.",
        verl="actor_rollout_ref.actor.ppo_mini_batch_size",
    )
    ppo_epochs: int = key(
        1,
        "Times that a step trains on its samples. Ratios stay those to the policy before the step. A step makes "
        "ppo_epochs times as many updates.",
        ge=1,
        advice="1 for GRPO and its relatives; 2 to 4 with PPO and a critic, where samples are expensive. Each epoch is "
        "further off-policy: watch actor/pg_clipfrac and actor/ppo_kl.",
        verl="actor_rollout_ref.actor.ppo_epochs",
    )
    shuffle: bool | None = key(
        None,
        "Draws the samples of each mini-batch from the whole step, in each epoch anew, by trainer.seed and the step. "
        "false: mini-batches follow the order of the prompts in every epoch. Left out: true with ppo_epochs above 1.",
        advice="Left out. With true, responses to one prompt are in different mini-batches.",
    )
    ppo_micro_batch_size_per_gpu: int = key(
        8,
        "Samples in one forward-backward pass of one data-parallel rank.",
        ge=1,
        unit="samples",
        advice="As large as memory allows. It changes speed and memory, never the gradient.",
        verl="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples in one forward pass that computes log-probs; left out: the micro-batches of the update.",
        ge=1,
        unit="samples",
        advice="Left out: the first update's ratio is then exactly 1. A larger size is faster, because there is no "
        "backward pass.",
        verl="actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    )
    use_remove_padding: bool = key(
        True,
        "Packs the samples of a micro-batch one after the other instead of padding them to one length.",
        advice="true: padding costs as much compute as text. Packing changes results by rounding only.",
    )
    use_dynamic_bsz: bool = key(
        False,
        "Cuts micro-batches by tokens instead of samples.",
        advice="true where lengths differ: less padding and a steadier peak of memory.",
        verl="actor_rollout_ref.actor.use_dynamic_bsz",
    )
    ppo_max_token_len_per_gpu: int | None = key(
        None,
        "Most tokens of one device in a micro-batch, with use_dynamic_bsz.",
        ge=1,
        unit="tokens",
        advice="At least (max_prompt_length + max_response_length) / context parallelism, so that the longest sample "
        "fits. 2 to 3 times that where memory allows.",
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "Most tokens of one device in a micro-batch that computes log-probs; left out: ppo_max_token_len_per_gpu.",
        ge=1,
        unit="tokens",
    )
    param_offload: bool = key(
        False,
        "Keeps parameters on the host while the engines generate.",
        advice="true for colocated placement where memory is short.",
        verl=("actor_rollout_ref.actor.fsdp_config.param_offload", "actor_rollout_ref.actor.megatron.param_offload"),
    )
    grad_offload: bool = key(
        False,
        "Keeps no memory for gradients except during a step's updates. They come back filled with zeros.",
        verl="actor_rollout_ref.actor.megatron.grad_offload",
    )
    optimizer_offload: bool = key(
        False,
        "Keeps float32 weights and moments on the host, except in updates and saves. With colocated placement "
        "they come back while log-probs are computed, where the plan finds memory for both.",
        verl=(
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
            "actor_rollout_ref.actor.megatron.optimizer_offload",
        ),
    )
    router_replay: Literal["disabled", "R2", "R3"] = key(
        "disabled",
        "Trains with experts that were chosen earlier. R2: those chosen when old log-probs were computed. R3: "
        "those chosen when the engine generated.",
        advice="disabled for one update a step, R2 for two. R3 for four or more, or where router/drift is high. GSPO "
        "often needs none.",
        verl=("actor_rollout_ref.actor.router_replay.mode", "actor_rollout_ref.actor.megatron.router_replay.mode"),
    )
    max_unrouted_share: float = key(
        0.5,
        "With router_replay R3: largest share of a step's responses that may come without any route. Above it "
        "the run ends with exit code 4 before it trains on the step. It also ends where no response has a "
        "route.",
        ge=0,
        le=1,
        advice="Single tokens without a route, such as those of cached prompts, count in router/missing_routes. A "
        "whole response without a route is a fault of its engine.",
    )
    freeze_router: bool = key(
        False,
        "Leaves the policy's routers as the checkpoint has them: they get no gradient and no weight decay.",
        advice="A last resort, where router/drift or router/max_violation grows although routes are replayed.",
        verl="actor_rollout_ref.actor.megatron.freeze_moe_router",
    )
    override_ddp_config: dict[str, Any] = key(
        {},
        "Fields of Megatron's DistributedDataParallelConfig.",
        advice="For replicas over a network: overlap_grad_reduce: true sums gradients during the last micro-batch's "
        "backward pass. overlap_param_gather: true gathers updated weights during the next forward pass. "
        "grad_reduce_in_fp32: false halves the gradients' bytes and rounds their sums to 16 bits.",
    )

    @property
    def shuffles(self) -> bool:
        """Whether mini-batches are drawn from the whole step, in each epoch anew."""
        return self.ppo_epochs > 1 if self.shuffle is None else self.shuffle

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Names of the keys that are on and move something to the host."""
        return tuple(name for name in SWITCHES.values() if getattr(self, name))


class RefConfig(Section):
    """The reference model of a KL. It has the actor's layout."""

    path: str | None = key(
        None,
        "Checkpoint of the reference model, of the actor's architecture; left out: model.path.",
        is_path=True,
    )
    param_offload: bool = key(
        False,
        "Keeps the reference model's parameters on the host between its passes.",
        advice="The same as actor.param_offload.",
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
        "Cuts the reference model's micro-batches by tokens; left out: actor.use_dynamic_bsz.",
        verl="actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "Most tokens of one device in a micro-batch of the reference model; left out: the actor's.",
        ge=1,
        unit="tokens",
    )


class CriticOptimConfig(OptimConfig):
    """Adam of the critic."""

    lr: float = key(
        1e-5,
        "Peak learning rate of the critic.",
        gt=0,
        advice="About ten times the actor's, because the critic's head starts at zero.",
    )


class CriticConfig(Section):
    """The value model of algorithm.adv_estimator: gae, on the actor's ranks.

    It has the actor's architecture, with one number a token in place of the output layer. `layout` names the degrees
    that differ from actor.layout.
    """

    path: str | None = key(
        None,
        "Checkpoint that the critic starts from, of the actor's architecture; left out: model.path. Its head "
        "starts at zero.",
        is_path=True,
    )
    layout: OtherLayoutConfig | None = None
    optim: CriticOptimConfig = CriticOptimConfig()
    ppo_mini_batch_size: int | None = key(
        None,
        "Prompts per update of the critic; left out: the actor's.",
        ge=1,
        unit="prompts",
    )
    ppo_epochs: int | None = key(
        None, "Times that a step trains the critic on its samples; left out: the actor's.", ge=1
    )
    shuffle: bool | None = key(
        None, "Draws the samples of the critic's mini-batches, as actor.shuffle; left out: as the actor's key says."
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples in one forward-backward pass of the critic on one data-parallel rank; left out: the actor's.",
        ge=1,
        unit="samples",
    )
    forward_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples in one forward pass that computes values; left out: the micro-batches of the critic's update.",
        ge=1,
        unit="samples",
    )
    ppo_max_token_len_per_gpu: int | None = key(
        None,
        "Most tokens of one device in a micro-batch of the critic, with actor.use_dynamic_bsz; left out: the actor's.",
        ge=1,
        unit="tokens",
    )
    forward_max_token_len_per_gpu: int | None = key(
        None,
        "Most tokens of one device in a micro-batch that computes values; left out: that of the critic's update.",
        ge=1,
        unit="tokens",
    )
    cliprange_value: float = key(
        0.5,
        "How far a value may move from its value before the step. Beyond that its loss is clipped.",
        gt=0,
        advice="0.5. Where the spread of rewards is far from 1, that spread.",
    )
    loss_agg_mode: str = key(
        "token-mean",
        "How the squared errors of tokens become one number.",
        advice="token-mean.",
        rule=known_name([name for name, each in AGGREGATIONS.items() if not each.needs_scale_factor], ALIASES),
    )
    param_offload: bool = key(
        False,
        "Keeps the critic's parameters on the host, except while it computes.",
        advice="true for colocated placement, like actor.param_offload.",
    )
    grad_offload: bool = key(
        False,
        "Keeps no memory for its gradients except during its updates of a step.",
    )
    optimizer_offload: bool = key(
        False,
        "Keeps the critic's float32 weights and moments on the host, except in its updates and in saves.",
    )

    def keeps_rows_of(self, actor: ActorConfig) -> bool:
        """Whether as many replicas of the critic train on the rows that the actor's replicas have.

        Rows are dealt evenly inside each mini-batch of the actor's first epoch, so the critic's have to consist of
        whole ones.
        """
        own = self.as_actor(actor)
        return own.ppo_mini_batch_size % actor.ppo_mini_batch_size == 0 and own.shuffles == actor.shuffles

    def as_actor(self, actor: ActorConfig) -> ActorConfig:
        """Returns the critic's settings in the form of an actor's section.

        Keys that the critic leaves out have the actor's values.
        """
        together = {"override_optimizer_config": actor.optim.override_optimizer_config}
        own = {
            "layout": self.layout,
            "ppo_mini_batch_size": self.ppo_mini_batch_size,
            "ppo_epochs": self.ppo_epochs,
            "shuffle": self.shuffle,
            "ppo_micro_batch_size_per_gpu": self.ppo_micro_batch_size_per_gpu,
            "ppo_max_token_len_per_gpu": self.ppo_max_token_len_per_gpu,
        }
        always = {
            "optim": self.optim.model_copy(update=together),
            "lora": LoraConfig(),
            "mtp": MtpConfig(),
            "router_replay": "disabled",
            "freeze_router": False,
            "log_prob_micro_batch_size_per_gpu": self.forward_micro_batch_size_per_gpu,
            "log_prob_max_token_len_per_gpu": self.forward_max_token_len_per_gpu,
        }
        switches = {name: getattr(self, name) for name in SWITCHES.values()}
        given = {name: value for name, value in own.items() if value is not None}
        return actor.model_copy(update=given | always | switches)
