"""Keys of the loop, the cluster, the weight sync and the records."""

from collections.abc import Sequence
from typing import Literal

from mrl.config.section import PLAIN_NAME, PRINTABLE, Section, key, must_be
from mrl.units import MOST_DEVICES, MOST_OF_A_NODE

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
    """The loop: its length, its schedule, what it saves and where it reports."""

    experiment_name: str = key(
        "default",
        "Name of the run and of its folder.",
        advice="Model, recipe and what is tried, such as qwen3-30b-gspo-clip4e-4.",
        verl="trainer.experiment_name",
        rule=PLAIN_NAME,
    )
    run_dir: str | None = key(
        None,
        "Folder that the run writes into; left out: runs/<experiment_name>.",
        advice="An absolute path, on storage that every node sees.",
        verl="trainer.default_local_dir",
        rule=PRINTABLE,
        is_path=True,
    )
    resume_mode: Literal["disable", "auto", "resume_path"] = key(
        "disable",
        "What a start without --resume does. disable: begins a run, and refuses a folder that holds one. "
        "auto: resumes the run in the folder, where there is one. resume_path: begins a run in an empty "
        "folder from the checkpoint in resume_from_path.",
        advice="auto for jobs that a scheduler restarts. Otherwise disable, so that no run is resumed by mistake.",
        verl="trainer.resume_mode",
    )
    resume_from_path: str | None = key(
        None,
        "With resume_path: a step-N folder, or a run, of which the newest checkpoint is taken. The new run "
        "starts with its weights, optimizer state, step and position in the data.",
        verl="trainer.resume_from_path",
        is_path=True,
    )
    schedule: Literal["sync", "one_step_off", "bounded"] = key(
        "sync",
        "How far generation runs ahead of training. sync: both take turns. one_step_off: the next step's "
        "responses are generated while this step trains. bounded: generation is up to max_staleness steps "
        "ahead.",
        advice="sync until a run is understood. Then one_step_off, where generation and training take about the same "
        "time.",
    )
    max_staleness: int = key(
        0,
        "With bounded: most steps that a token may lag behind the weights that train on it.",
        ge=0,
        unit="steps",
        advice="1 or 2, with a rollout_correction. 0 gives the synchronous order.",
    )
    partial_rollouts: bool = key(
        False,
        "With bounded: a response may start with one version of the weights and continue with the next. Each "
        "token keeps the log-prob of its own version.",
        advice="true where a few long responses delay the rest.",
    )
    segment_tokens: int | None = key(
        None,
        "With partial_rollouts: tokens that each version but the last may add to a response; left out: an "
        "equal share of the longest response.",
        ge=1,
        unit="tokens",
    )
    order: Literal["in_order", "ready_first"] = key(
        "in_order",
        "With bounded: what a step trains on. in_order: the next prompts of the data, with the same bits "
        "whatever the engines' speed. ready_first: whatever is finished, while engines keep unfinished "
        "responses over an update. Then no two runs are equal.",
        advice="ready_first where engines wait too long for each other with in_order, and no run has to be repeated.",
    )
    on_stale: Literal["requeue", "drop"] = key(
        "requeue",
        "With ready_first: what happens to a group whose oldest token is too old. requeue: its prompt is "
        "answered again. drop: it is discarded.",
        advice="requeue: dropping removes mostly long responses, which lowers the length metrics.",
    )
    seed: int = key(
        0,
        "Seed of the prompts' order, of sampling and of initial states.",
        ge=0,
        le=2**32 - 1,  # numpy's, which vLLM gives it to
    )
    deterministic: bool = key(
        False,
        "Restricts ranks to deterministic kernels, so that a resumed run repeats bit by bit.",
    )
    total_epochs: int = key(1, "Passes over the prompts.", ge=1, verl="trainer.total_epochs")
    total_training_steps: int | None = key(
        None,
        "Steps of the run; left out: total_epochs decides.",
        ge=1,
        unit="steps",
        verl="trainer.total_training_steps",
    )
    critic_warmup: int = key(
        0,
        "With a critic: the first step that also updates the actor. The steps before it train the critic alone.",
        ge=0,
        unit="steps",
        advice="0. For a critic with a new head 10 to 20: until then its values carry no information.",
    )
    save_freq: int = key(
        -1,
        "Steps between checkpoints; -1: only at the end.",
        unit="steps",
        advice="About an hour of training, because a crash loses as much.",
        rule=_EVERY,
    )
    test_freq: int = key(-1, "Steps between validations; -1: never.", unit="steps", rule=_EVERY)
    val_before_train: bool = key(
        True,
        "Validates the untrained model, too.",
        advice="true: it is the baseline for all later scores.",
        verl="trainer.val_before_train",
    )
    val_only: bool = key(
        False,
        "Ends the run after the validation before training: of the model, or of the checkpoint of resume_mode: "
        "resume_path. Nothing is trained or saved.",
        advice="false. `mrl eval` validates without ranks.",
    )
    log_val_generations: int = key(
        0,
        "Validation responses that loggers with text show. All of them are saved in any case.",
        ge=0,
        advice="10 while a run is new, to read them.",
    )
    max_actor_ckpt_to_keep: int = key(2, "Checkpoints that are kept, the newest first.", ge=1)
    async_save: bool = key(
        True,
        "Writes checkpoints while training goes on. false: training waits for the disk. Both write from a "
        "copy in host memory.",
        advice="false only where the busy disk slows training more than waiting does. It saves no memory.",
    )
    max_failed_saves: int = key(
        10,
        "Failed saves in a row after which the run stops with exit code 4; 0: it never stops for them. Nothing "
        "else that a full disk refuses ends a run: lines of metrics wait for room, other files and output are lost.",
        ge=0,
        advice="Few where steps are expensive: what is trained after the last checkpoint is lost when the run ends.",
    )
    max_skipped_updates: int = key(
        3,
        "Updates in a row that may be skipped for NaN or inf in loss or gradient. At this number the run "
        "stops with exit code 6.",
        ge=1,
        unit="updates",
        advice="One bad batch is skipped. Several in a row point to broken weights or a learning rate that is too "
        "high.",
    )
    restart_limit: int = key(
        3,
        "Restarts inside the run, in 100 finished steps, of ranks that were killed or do not respond. They start "
        "from the newest intact checkpoint. After them, and always with 0, a loss ends the run, which can be "
        "resumed. A restart of the ranks because a step lost its last engine "
        "counts, too.",
        ge=0,
        advice="0 where whoever submits the run restarts it anyway.",
    )
    logger: tuple[str, ...] = key(
        ("console", "tensorboard"), "Loggers that get the metrics, beside the file metrics.jsonl."
    )
    logger_timeout_s: float = key(
        60.0,
        "Longest time that a logger may take for one step. After it the logger is no longer used.",
        gt=0,
        unit="s",
    )
    project_name: str = key(
        "mrl",
        "Project under which hosted loggers list the run. Its name there is experiment_name.",
        verl="trainer.project_name",
        rule=PLAIN_NAME,
    )

    @property
    def warmup_steps(self) -> int:
        """Steps that train a critic and leave the actor unchanged: those before step critic_warmup."""
        return max(self.critic_warmup - 1, 0)


class ClusterConfig(Section):
    """The devices and nodes that the run uses."""

    device: Literal["cpu", "cuda", "npu"] = key(
        "cuda", "Kind of device that ranks and engines run on.", verl="trainer.device"
    )
    nnodes: int = key(1, "Number of nodes.", ge=1, le=MOST_DEVICES, verl="trainer.nnodes")
    n_gpus_per_node: int = key(
        1,
        "Devices of a node. On cpu: ranks of a node.",
        advice="An Atlas A3 node has 16, an A2 node 8.",
        ge=1,
        le=MOST_OF_A_NODE,
        verl="trainer.n_gpus_per_node",
    )
    accelerator: str | None = key(
        None,
        "Model of the devices that plans assume, as `mrl plan --device` names it; left out: the smallest of its kind.",
    )
    calibration: str | None = key(
        None,
        "File with what earlier runs on these devices showed, written by `mrl plan --calibrate`. Plans and searches "
        "compute with it; left out: with published figures.",
        advice="Calibrate after the first run on a cluster, and search again. It needs accelerator beside it, except "
        "on cpu.",
        is_path=True,
    )
    versions: dict[str, str] = key(
        {},
        "Versions of packages on the cluster where they differ from the tested set. Rules then follow these versions.",
        advice="Leave it out and install the tested set; `mrl doctor` compares.",
    )
    placement: Literal["separate", "colocated"] = key(
        "separate",
        "Whether engines have devices of their own (separate) or share the actor's (colocated).",
        advice="separate where there are enough devices. colocated where all of them must train and generate in turn.",
    )
    cpus_per_actor: float = key(1.0, "CPUs that Ray reserves for a rank.", gt=0)
    cpus_per_engine: float = key(
        1.0, "CPUs that Ray reserves for an engine, all of its data-parallel ranks together.", gt=0
    )
    address: str | None = key(
        None,
        "HOST:PORT of a running Ray cluster; left out: $RAY_ADDRESS, or else a cluster is started for the run.",
    )
    port: int | None = key(
        None,
        "Port on the host of rank 0 where the actor's ranks meet; left out: a free one.",
        ge=1024,
        le=65535,
    )
    start_timeout_s: float = key(
        600.0,
        "Longest wait until ranks have started and loaded the model.",
        gt=0,
        unit="s",
        advice="More for large models on slow storage.",
    )
    step_timeout_s: float = key(
        3600.0,
        "Longest wait for one call to ranks or engines. Left out: 3600 s until a call of that kind has "
        "finished once. After that ten times the longest so far, at least 60 s. With several nodes ranks get "
        "reshard.timeout_s more than that.",
        gt=0,
        unit="s",
    )


class ReshardConfig(Section):
    """The weight sync, which brings trained weights to the engines."""

    path: Literal["fast", "slow"] = key(
        "fast",
        "How weights reach the engines. fast: shard to shard, by a plan. slow: full tensors through vLLM's own loader.",
    )
    transport: Literal["auto", "shm", "p2p", "ipc"] = key(
        "auto",
        "How two processes exchange bytes. auto: device memory that a process can open from another (CUDA: "
        "the whole node, NPU: its own device), host shared memory on CPU, else p2p. p2p: torch.distributed, but "
        "device memory for two processes on one device. "
        "ipc: as auto, with host shared memory instead of p2p within a node. shm: host shared memory, which "
        "every byte crosses twice.",
        advice="auto. p2p where devices of a node cannot reach each other's memory (neither NVLink nor peer access).",
    )
    budget_mb: int = key(
        256,
        "Most bytes that a rank sends, or a worker receives, in one round. Staging buffers take twice that.",
        ge=1,
        le=1_000_000,
        unit="MiB",
        advice="256. Less where memory is short, which makes more rounds. Every process holds the whole plan: for "
        "235B 60 MiB at 256, 150 MiB at 16, 1.8 GiB at 1.",
    )
    verify_every: int = key(
        1,
        "Syncs between two readings of the weights that engines finally hold and that ranks hold in common. "
        "What an engine received is checked in every sync.",
        ge=1,
        unit="syncs",
    )
    timeout_s: float = key(300.0, "Longest wait for another process in a sync.", gt=0, unit="s")


def _are_steps(steps: Sequence[int]) -> bool:
    return not steps or min(steps) >= 1


def _are_ranks(ranks: Sequence[int]) -> bool:
    return not ranks or min(ranks) >= 0


class ProfileConfig(Section):
    """Profiles of single steps on ranks of the actor: from the old log-probs to the end of the update."""

    steps: tuple[int, ...] = key(
        (),
        "Steps that are profiled, counted from 1; empty: none.",
        advice="A step after the first two, which are slower. A profiled step takes longer than others.",
        rule=must_be(_are_steps, "must be at least 1", "steps are counted from 1"),
    )
    ranks: tuple[int, ...] = key(
        (0,),
        "Ranks of the actor that are profiled; empty: all.",
        advice="One rank of each pipeline stage. A trace of a large model has hundreds of megabytes.",
        rule=must_be(_are_ranks, "must be at least 0", "ranks are counted from 0"),
    )
    tool: Literal["torch", "nsys"] = key(
        "torch",
        "torch: each rank writes a trace of torch's profiler, profiles/step-N/rank-R.json.gz, for ui.perfetto.dev. "
        "nsys: ranks mark their work with NVTX ranges between cudaProfilerStart and cudaProfilerStop, for Ray "
        "processes that were started under nsys profile --capture-range=cudaProfilerApi.",
    )


class RecordConfig(Section):
    """The samples that a run keeps, beside its metrics, and profiles of its steps."""

    samples: int | Literal["all", "none"] = key(
        "all",
        "Responses of a step that are kept in samples/: all, none, or a number of them, spread evenly over the step.",
        advice="all while there is disk space: about 6 bytes a token. A number for runs of hundreds of large steps.",
        rule=_SOME,
    )
    samples_max_gib: float | None = key(
        256.0,
        "Size of all files in samples/, with images of tools and agents that they name. Above it the files of the "
        "oldest steps are removed. null: no limit.",
        gt=0,
        unit="GiB",
    )
    trainer_log_probs: bool = key(
        False,
        "Keeps in samples/, for each response token, the difference between the log-probs of trainer and "
        "engine before the update. Refused with algorithm.anchor: on_policy, which computes none before the "
        "update.",
    )
    routes: bool = key(
        False,
        "Keeps in samples/ the experts that engines chose for each token, which actor.router_replay: R3 replays. mrl "
        "explain needs them to compute a step of such a run again.",
        advice="For runs that may need an explanation: a token takes moe layers x experts per token bytes, 384 of "
        "Qwen3-30B-A3B, beside about 6.",
    )
    profile: ProfileConfig = ProfileConfig()
