"""Keys of on-policy distillation: the teacher that scores the responses, and how its scores enter the update."""

from typing import Any

from mrl.algo.spec import ALIASES, KL_TYPES, OVER_WORDS
from mrl.config.schema_actor import LayoutConfig
from mrl.config.section import Section, key, known_name


class TeacherConfig(Section):
    """The teacher. It computes on the actor's ranks, in process groups of its own, and is never changed. `layout` has
    the keys of actor.layout; left out, it lies as the actor, without the degrees of experts where it has none.
    """

    model_path: str | None = key(
        None,
        "Hugging Face checkpoint of the teacher, of any family and size that is known here and of the actor's "
        "tokenizer: a folder, or a name on the hub as in model.path.",
        advice="On storage that every node sees.",
        is_path=True,
    )
    layout: LayoutConfig | None = None
    override_transformer_config: dict[str, Any] = key(
        {},
        "Fields of Megatron's TransformerConfig for the teacher, as model.override_transformer_config has those of the "
        "actor, which the teacher does not get.",
        advice="What makes its passes fast: moe_permute_fusion: true for experts on accelerators.",
    )
    param_offload: bool = key(
        False,
        "The teacher's parameters are on the host when it is not asked.",
        advice="true wherever it does not fit beside the update; it costs one way there and back a step.",
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples in one forward pass of the teacher; left out: the actor's.",
        ge=1,
        unit="samples",
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "Tokens of one device in its micro-batches, with actor.use_dynamic_bsz; left out: the actor's.",
        ge=1,
        unit="tokens",
    )


class DistillationLossConfig(Section):
    """What becomes of the teacher's log-probs."""

    loss_mode: str = key(
        "k1",
        f"Estimator of KL(student || teacher) from a sampled token, or {OVER_WORDS}: that KL over the teacher's "
        "likeliest words.",
        advice=f"k1 with use_policy_gradient, whose mean is that KL's gradient; {OVER_WORDS}, k2 or k3+ without it.",
        rule=known_name((*KL_TYPES, OVER_WORDS), ALIASES),
    )
    use_policy_gradient: bool = key(
        True,
        "The estimate of each token, with its sign turned, is added to the token's advantage; false: it is a term of "
        "the loss with a gradient of its own.",
        advice="true, with a loss whose advantages may differ by token: gspo-token or vanilla. gspo takes the mean "
        "over a response.",
    )
    use_task_rewards: bool = key(
        True,
        "Rewards count too; false: the teacher alone says what is learnt, and rewards are recorded only.",
    )
    task_rewards_coef: float = key(1.0, "Weight of the advantages that come from rewards.", ge=0)
    distillation_loss_coef: float = key(
        1.0,
        "Weight of the teacher's part.",
        gt=0,
        advice="Advantages of grpo have a spread of 1 a response; the KL is in nats a token.",
    )
    loss_max_clamp: float | None = key(
        None,
        "Bound of a token's estimate, in nats, on both sides; left out: none.",
        gt=0,
        advice="10 where the teacher finds some tokens all but impossible.",
    )

    topk: int = key(
        32,
        "Words of the teacher that loss_mode reverse_kl_topk is over; all others count as one.",
        ge=1,
        unit="words",
        advice="16 to 64; distillation/teacher_mass says what the teacher gives them together. Each takes 8 bytes a "
        "token on hosts, and no logits are kept.",
    )

    @property
    def reward_weight(self) -> float:
        """What advantages from rewards are multiplied by."""
        return self.task_rewards_coef * self.use_task_rewards


class DistillationConfig(Section):
    """On-policy distillation: a teacher scores what the actor samples."""

    enabled: bool = key(
        False,
        "A teacher scores the responses, and the update draws the actor towards it.",
    )
    teacher_model: TeacherConfig = TeacherConfig()
    distillation_loss: DistillationLossConfig = DistillationLossConfig()

    @property
    def in_advantages(self) -> bool:
        """Whether the teacher's part is an advantage of each token."""
        return self.enabled and self.distillation_loss.use_policy_gradient

    @property
    def over_words(self) -> bool:
        """Whether the teacher's likeliest words are wanted, and not the sampled one alone."""
        return self.enabled and self.distillation_loss.loss_mode == OVER_WORDS

    @property
    def in_loss(self) -> bool:
        """Whether it is a term of the loss."""
        return self.enabled and not self.distillation_loss.use_policy_gradient
