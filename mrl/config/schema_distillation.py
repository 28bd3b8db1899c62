"""Keys of on-policy distillation: the teacher that scores responses, and how its scores enter the update."""

from typing import Any

from mrl.algo.spec import ALIASES, FORWARD_OVER_TOP_K, KL_TYPES, OVER_TOP_K, REVERSE_OVER_TOP_K
from mrl.config.schema_actor import OtherLayoutConfig
from mrl.config.section import Section, key, known_name


class TeacherConfig(Section):
    """The teacher, on the actor's ranks. It is never changed.

    `layout` names the degrees that differ from actor.layout. A teacher without experts has no expert degrees.
    """

    model_path: str | None = key(
        None,
        "Hugging Face checkpoint of the teacher: a folder, or a name on the hub as in model.path. It may have "
        "any known family and size, and must have the actor's tokenizer.",
        advice="A folder on storage that every node sees.",
        is_path=True,
    )
    layout: OtherLayoutConfig | None = None
    override_transformer_config: dict[str, Any] = key(
        {},
        "Fields of Megatron's TransformerConfig for the teacher. model.override_transformer_config holds for "
        "the actor alone.",
        advice="Whatever makes its passes fast: moe_permute_fusion: true for experts on accelerators.",
    )
    param_offload: bool = key(
        False,
        "Keeps the teacher's parameters on the host between its passes.",
        advice="true where the teacher does not fit on the device during the update. Each step then copies it to the "
        "device and back.",
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples in one forward pass of the teacher; left out: the actor's.",
        ge=1,
        unit="samples",
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "Most tokens of one device in a micro-batch of the teacher, with actor.use_dynamic_bsz; left out: the actor's.",
        ge=1,
        unit="tokens",
    )


class DistillationLossConfig(Section):
    """The loss of a distillation: how the teacher's log-probs enter the update."""

    loss_mode: str = key(
        "k1",
        f"Estimator of KL(student || teacher) from a sampled token. {REVERSE_OVER_TOP_K}: that KL over the teacher's "
        f"most likely tokens. {FORWARD_OVER_TOP_K}: KL(teacher || student) over only these tokens, as in verl.",
        advice="k1 with use_policy_gradient, whose mean is that KL's gradient; "
        f"{REVERSE_OVER_TOP_K}, k2 or k3+ without it.",
        rule=known_name((*KL_TYPES, *OVER_TOP_K), ALIASES),
    )
    use_policy_gradient: bool = key(
        True,
        "Adds each token's estimate, with its sign turned, to the token's advantage. false: the estimate is a "
        "term of the loss with its own gradient.",
        advice="true, with a loss whose advantages may differ by token, such as vanilla or gspo. geo_mean takes the "
        "mean over a response.",
    )
    use_task_rewards: bool = key(
        True,
        "Lets rewards count too. false: the teacher alone decides what is learnt, and rewards are only recorded.",
    )
    task_rewards_coef: float = key(1.0, "Weight of the advantages that come from rewards.", ge=0)
    distillation_loss_coef: float = key(
        1.0,
        "Weight of the teacher's part.",
        gt=0,
        advice="Compare both sizes: advantages of grpo have a spread of 1 a response, the KL is in nats a token.",
    )
    loss_max_clamp: float | None = key(
        None,
        "Bound of a token's estimate on both sides, in nats; left out: none.",
        gt=0,
        advice="10 where the teacher finds some tokens almost impossible.",
    )

    topk: int = key(
        32,
        "Most likely tokens of the teacher that reverse_kl_topk and forward_kl_topk sum over. All other tokens count "
        "as one in the first, and not at all in the second.",
        ge=1,
        unit="tokens",
        advice="16 to 64. distillation/teacher_mass says how much probability the teacher gives them together. On the "
        "hosts each takes 8 bytes for every response token. Logits are not kept.",
    )

    log_prob_min_clamp: float | None = key(
        None,
        "forward_kl_topk: least log-prob of a token. Smaller ones count as this, without a gradient; left out: none.",
        lt=0,
        unit="nats",
        advice="-10, where the student finds a token of the teacher almost impossible.",
    )

    @property
    def reward_weight(self) -> float:
        """Factor of the advantages that come from rewards."""
        return self.task_rewards_coef * self.use_task_rewards


class DistillationConfig(Section):
    """On-policy distillation: a teacher scores what the actor samples."""

    enabled: bool = key(
        False,
        "Lets a teacher score the responses. The update then pulls the actor towards it.",
    )
    teacher_model: TeacherConfig = TeacherConfig()
    distillation_loss: DistillationLossConfig = DistillationLossConfig()

    @property
    def alone(self) -> bool:
        """Whether advantages from rewards have no weight beside a teacher's."""
        return self.enabled and self.distillation_loss.reward_weight == 0

    @property
    def in_advantages(self) -> bool:
        """Whether the teacher's part is an advantage of each token."""
        return self.enabled and self.distillation_loss.use_policy_gradient

    @property
    def over_top_k(self) -> bool:
        """Whether the loss needs the teacher's most likely tokens, not only the sampled one."""
        return self.enabled and self.distillation_loss.loss_mode in OVER_TOP_K

    @property
    def in_loss(self) -> bool:
        """Whether the teacher's part is a term of the loss."""
        return self.enabled and not self.distillation_loss.use_policy_gradient
