"""Keys of the loop, the cluster and the weight sync."""

from typing import Literal

from mrl.config.section import PLAIN_NAME, PRINTABLE, Section, key, must_be

_EVERY = must_be(lambda n: n == -1 or n >= 1, "must be -1 or at least 1 step", "-1 switches it off", -1, 1)

_SOME = must_be(
    lambda n: isinstance(n, str) or (not isinstance(n, bool) and n >= 1),
    "must be all, none or at least 1 response",
    "none keeps no file at all",
    "all",
    "none",
    1,
)


class TrainerConfig(Section):
    """The loop: how long, how often, where to."""

    experiment_name: str = key(
        "default",
        "Name of the run, and of its folder.",
        advice="model, recipe, and what is tried: qwen3-30b-gspo-clip4e-4.",
        verl="trainer.experiment_name",
        rule=PLAIN_NAME,
    )
    run_dir: str | None = key(
        None,
        "Where the run writes; left out: runs/<experiment_name>.",
        advice="Absolute, on storage that every node sees.",
        verl="trainer.default_local_dir",
        rule=PRINTABLE,
        is_path=True,
    )
    resume_mode: Literal["disable", "auto", "resume_path"] = key(
        "disable",
        "What a start does without --resume. disable: begins a run, and refuses a folder that holds one; auto: goes on "
        "with the run of the folder where it holds one; resume_path: begins a run in an empty folder from the "
        "checkpoint resume_from_path.",
        advice="auto for jobs that a scheduler starts again; disable otherwise: no run is then continued by mistake.",
        verl="trainer.resume_mode",
    )
    resume_from_path: str | None = key(
        None,
        "With resume_path: a step-N folder, or a run whose newest is meant. Weights, optimizer, step and "
        "place in the data are its.",
        verl="trainer.resume_from_path",
        is_path=True,
    )
    schedule: Literal["sync", "one_step_off", "bounded"] = key(
        "sync",
        "Whether generation runs ahead of training. sync: in turn; one_step_off: the next step's responses are "
        "generated while this one trains; bounded: up to max_staleness steps ahead.",
        advice="sync until a run is understood; then one_step_off where generation and training take about as long.",
    )
    max_staleness: int = key(
        0,
        "With bounded: updates that a token may be behind the weights that are trained with it.",
        ge=0,
        unit="updates",
        advice="1 or 2, with a rollout_correction; 0 is the synchronous order.",
    )
    partial_rollouts: bool = key(
        False,
        "With bounded: a response may be begun by one version of the weights and go on by the next; each "
        "token keeps its own log-prob.",
        advice="true where a few long responses hold up the rest.",
    )
    segment_tokens: int | None = key(
        None,
        "With partial_rollouts: tokens of a response by each version before its last; left out: an equal share "
        "of the longest response.",
        ge=1,
        unit="tokens",
    )
    order: Literal["in_order", "ready_first"] = key(
        "in_order",
        "With bounded: what a step trains on. in_order: the next prompts of the data, the same bits whatever the "
        "engines' speed; ready_first: what is finished, while responses are held in the engines over an update of the "
        "weights. Then no two runs are alike.",
        advice="ready_first where engines wait too long at the borders of in_order, and no run has to be repeated.",
    )
    on_stale: Literal["requeue", "drop"] = key(
        "requeue",
        "With ready_first: what becomes of a group whose oldest token is too old. requeue: its prompt is answered "
        "anew; drop: nobody is trained on it.",
        advice="requeue: dropping takes long responses away, which the metrics then show by their length.",
    )
    seed: int = key(0, "Of prompts' order, sampling and initial states.")
    deterministic: bool = key(
        False,
        "Ranks use deterministic kernels only, so that a resumed run repeats bit by bit.",
    )
    total_epochs: int = key(1, "Passes over the prompts.", ge=1, verl="trainer.total_epochs")
    total_training_steps: int | None = key(
        None,
        "Steps; wins over total_epochs.",
        ge=1,
        unit="steps",
        verl="trainer.total_training_steps",
    )
    critic_warmup: int = key(
        0,
        "With a critic: the first step that also updates the actor; the steps before it train the critic alone.",
        ge=0,
        unit="steps",
        advice="0, or 10 to 20 for a critic whose head is new: until then it says nothing of a token.",
    )
    save_freq: int = key(
        -1,
        "Steps between checkpoints; -1: only at the end.",
        unit="steps",
        advice="About an hour's worth: that is what a crash costs.",
        rule=_EVERY,
    )
    test_freq: int = key(-1, "Steps between validations; -1: never.", unit="steps", rule=_EVERY)
    val_before_train: bool = key(
        True,
        "Validates the untrained model too.",
        advice="true: without it nobody knows what was gained.",
        verl="trainer.val_before_train",
    )
    log_val_generations: int = key(
        0,
        "Validation responses that loggers of text show; all are saved in any case.",
        ge=0,
        advice="10 while a run is new: read them.",
    )
    max_actor_ckpt_to_keep: int = key(2, "Newest checkpoints that are kept.", ge=1)
    async_save: bool = key(
        True,
        "Checkpoints are written while training goes on; false: training waits for the disk. Either way "
        "from a copy in host memory.",
        advice="Off where a disk that is busy with a checkpoint slows training more than waiting "
        "does. It saves no memory.",
    )
    max_failed_saves: int = key(
        10,
        "So many saves in a row that the disk does not take stop the run, with exit code 4; 0: it goes on without end.",
        ge=0,
        advice="What is trained after the last checkpoint is lost where the run ends: few, where steps are dear.",
    )
    max_skipped_updates: int = key(
        3,
        "So many updates in a row that could not be applied (NaN or inf in loss or gradient) stop "
        "the run with exit code 6.",
        ge=1,
        unit="updates",
        advice="One bad batch is passed over; a run of them means that the weights or the "
        "learning rate are the trouble.",
    )
    restart_limit: int = key(
        3,
        "Times that ranks which are killed or stand still are started again inside the run, from the newest intact "
        "checkpoint, in 100 finished steps; past it their loss ends the run, which can be resumed. 0: it always does. "
        "Ranks that go back since the last engine was lost behind an update count too, where engines are started "
        "again.",
        ge=0,
        advice="0 where whoever submits the run restarts it anyway.",
    )
    logger: tuple[str, ...] = key(("console", "tensorboard"), "Where metrics go, besides metrics.jsonl.")
    logger_timeout_s: float = key(
        60.0,
        "A logger that is busy with one step for longer is left out from then on.",
        gt=0,
        unit="s",
    )
    project_name: str = key(
        "mrl",
        "Under which hosted loggers file the run; its name there is experiment_name.",
        verl="trainer.project_name",
        rule=PLAIN_NAME,
    )

    @property
    def warmup_steps(self) -> int:
        """Steps that train a critic and leave the actor as it is: those before step critic_warmup."""
        return max(self.critic_warmup - 1, 0)


class ClusterConfig(Section):
    """Where it runs."""

    device: Literal["cpu", "cuda", "npu"] = key("cuda", "What it runs on.", verl="trainer.device")
    nnodes: int = key(1, "Nodes.", ge=1, le=100_000, verl="trainer.nnodes")
    n_gpus_per_node: int = key(
        1,
        "Devices of a node; on cpu: ranks. An Atlas A3 node has 16, an A2 node 8.",
        ge=1,
        le=1000,
        verl="trainer.n_gpus_per_node",
    )
    accelerator: str | None = key(
        None,
        "Model of the devices, as `mrl plan --device` names it, that plans assume; left out: the smallest of its kind.",
    )
    versions: dict[str, str] = key(
        {},
        "Packages of the cluster whose version is not that of the tested row; the rules are "
        "then those of that version.",
        advice="Leave it out and install the row; `mrl doctor` compares.",
    )
    placement: Literal["separate", "colocated"] = key(
        "separate",
        "Engines on devices of their own, or on the actor's.",
        advice="separate where there are enough devices; colocated when all of them must train and generate in turn.",
    )
    cpus_per_actor: float = key(1.0, "CPUs that Ray reserves for a rank.", gt=0)
    cpus_per_engine: float = key(
        1.0, "CPUs that Ray reserves for an engine, all of its data-parallel ranks together.", gt=0
    )
    address: str | None = key(
        None,
        "HOST:PORT of a running Ray cluster; left out: $RAY_ADDRESS, else one is started for the run.",
    )
    port: int | None = key(
        None,
        "Where the actor's ranks meet, on the host of rank 0; left out: a free one.",
        ge=1024,
        le=65535,
    )
    start_timeout_s: float = key(
        600.0,
        "Longest wait for ranks to start and load.",
        gt=0,
        unit="s",
        advice="Large models on slow storage need more.",
    )
    step_timeout_s: float = key(
        3600.0,
        "Longest wait for one call to ranks or engines. Left out: so long until a call of its kind has ended once, "
        "then ten times the longest so far, 60 s at least.",
        gt=0,
        unit="s",
    )


class ReshardConfig(Section):
    """How trained weights reach the engines."""

    path: Literal["fast", "slow"] = key(
        "fast",
        "How weights reach the engines: shard to shard by a plan, or full tensors through vLLM's own loader.",
    )
    transport: Literal["auto", "shm", "p2p", "ipc"] = key(
        "auto",
        "How two processes exchange bytes; auto: device memory as far as a process can open another's (on CUDA of "
        "the whole node, on NPU of its own device), shared memory of the host on CPU, else p2p, which is "
        "torch.distributed; ipc: the same, and shared memory in place of p2p within a node; shm: shared memory of "
        "the host, which every byte crosses twice.",
        advice="auto. Where devices of a node cannot reach each other's memory (no NVLink and no peer access), p2p.",
    )
    budget_mb: int = key(
        256,
        "What a rank sends, or a worker receives, in one round; staging is twice that.",
        ge=1,
        le=1_000_000,
        unit="MiB",
        advice="256; less when memory is short, and more rounds. Every process has the plan of all of them: for 235B "
        "60 MiB at 256, 150 at 16, 1.8 GiB at 1.",
    )
    verify_every: int = key(
        1,
        "Syncs between two readings of what engines finally hold and what ranks hold in common; what an "
        "engine received is proved every time.",
        ge=1,
        unit="syncs",
    )
    timeout_s: float = key(300.0, "Longest wait for one peer.", gt=0, unit="s")


class RecordConfig(Section):
    """What a run keeps of its samples beside its metrics."""

    samples: int | Literal["all", "none"] = key(
        "all",
        "Responses of a step that samples/ keeps: all, none, or so many, evenly over the step.",
        advice="all while it fits: some 6 bytes a token. A number for runs of hundreds of large steps.",
        rule=_SOME,
    )
    samples_max_gib: float | None = key(
        256.0,
        "Of all files of samples/; beyond it the oldest steps' are removed. null: no limit.",
        gt=0,
        unit="GiB",
    )
    trainer_log_probs: bool = key(
        False,
        "Keeps of each response token in samples/ how far the trainer's log-prob before the update is from "
        "generation's; not with algorithm.anchor on_policy, which knows none before.",
    )
