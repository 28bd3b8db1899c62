"""Keys of the rollout engines."""

from typing import Any, Literal

from mrl.config.schema_actor import Dtype
from mrl.config.section import Section, key, must_be
from mrl.model.quantised import BLOCK

_NO_FILTER = must_be(lambda k: k == -1 or k >= 1, "must be -1 (no filter) or at least 1", "so many words are left", -1)


class ValSamplingConfig(Section):
    """Sampling of validation responses."""

    n: int = key(
        1,
        "Validation responses per prompt.",
        ge=1,
        le=100_000,
        advice="Few problems need many: 32 or 64 for AIME.",
        verl="actor_rollout_ref.rollout.val_kwargs.n",
    )
    temperature: float = key(
        1.0,
        "Of validation responses.",
        ge=0,
        advice="Above 0 for models that think at length; at 0 they loop.",
        verl="actor_rollout_ref.rollout.val_kwargs.temperature",
    )
    top_p: float = key(
        1.0,
        "Nucleus of validation responses.",
        gt=0,
        le=1,
        advice="0.7 to 1.",
        verl="actor_rollout_ref.rollout.val_kwargs.top_p",
    )
    top_k: int = key(
        -1,
        "Candidates of validation responses; -1: all.",
        verl="actor_rollout_ref.rollout.val_kwargs.top_k",
    )


class PythonConfig(Section):
    """Limits of one program that the shipped tool python runs."""

    max_seconds: float = key(5.0, "From its start to its end; it is then ended.", gt=0, unit="s")
    max_memory_gib: float = key(1.0, "Address space.", gt=0, unit="GiB")
    max_files_mib: float = key(
        16.0, "All files of its folder together, which lives as long as it does.", gt=0, unit="MiB"
    )
    unconfined: bool = key(
        False,
        "Whether programs run where the machine cannot confine them, with network, files and processes of the user; "
        "where it is false such a machine is refused. Linux with Landlock and seccomp can; `mrl doctor` says.",
        advice="false: it is what a model writes that runs.",
    )


class TurnsConfig(Section):
    """Tools and environments that the model may act on while it answers: a response is then a conversation of several
    turns.
    """

    tools: tuple[str, ...] = key(
        (),
        "Tools by name: shipped ones (calculator, python, search), and functions of the file under path.",
        advice="Few, each with a docstring that says when to call it: it is what the model reads.",
    )
    environments: tuple[str, ...] = key(
        (),
        "Environments by name: shipped ones (guess_the_number, textarena, verl_tools), and classes of the file under "
        "path. A row names its own in extra_info.environment where there are several.",
    )
    path: str | None = key(
        None,
        "Python file with tools and environments of your own: typed functions with a docstring, and classes of "
        "mrl.environments.environment.Environment. It runs in processes of its own.",
        is_path=True,
    )
    index: str | None = key(
        None,
        "File that the shipped tool search finds passages in; scripts/make_search_index.py writes it from JSON lines.",
        is_path=True,
    )
    tool_config_path: str | None = key(
        None,
        "verl's file of tools, classes of its BaseTool, which the shipped environment verl_tools is made of.",
        is_path=True,
    )
    python: PythonConfig = PythonConfig()
    max_turns: int = key(
        8,
        "Turns of a response, the last of which may call nothing more.",
        ge=1,
        advice="A response that calls in its last turn has ended, and is rewarded as it is.",
    )
    max_calls: int = key(4, "Calls of one turn that are made; those beyond are answered by an error.", ge=1)
    max_seconds: float = key(
        600.0,
        "Of all turns of a response together, each from its calls until the last of them is answered; then it has "
        "ended. What the engine takes does not count, and a call that waits for a free process does.",
        gt=0,
        unit="s",
        advice="Well above what all its calls take: what a clock ends does not repeat.",
    )
    max_answer_characters: int = key(
        4000,
        "Of one answer; a longer one is cut in the middle, which is said in it.",
        ge=1,
        unit="characters",
        advice="Answers count in data.max_response_length.",
    )
    timeout_s: float = key(
        10.0,
        "Deadline of one call; its process is then killed. A call of a tool is answered by an error; an environment "
        "has failed, see reward.max_failure_share. Of an agent, all that it does between two requests is one call.",
        gt=0,
        unit="s",
    )
    num_workers: int = key(
        2,
        "Processes of each engine that call tools, and as many that have environments; with rollout.endpoint, agents "
        "that run at once.",
        ge=1,
    )
    max_memory_gib: float | None = key(None, "Address space of such a process; left out: unlimited.", gt=0, unit="GiB")
    environment: tuple[str, ...] = key(
        (),
        "Variables that these processes are given beside the usual ones (PATH, HOME, PYTHON*, ...), by name or "
        "pattern: the key of a search service, say.",
    )
    network: bool = key(False, "Whether they may reach beyond the machine. Off needs Linux.")
    folders: tuple[str, ...] = key(
        (),
        "Folders that they may write into, beside temporary ones. Needs Linux with Landlock; without it they write "
        "wherever the user may, and their log says so.",
    )


class AgentConfig(Section):
    """An agent of your own, started once a response: a command, or a function of a Python file."""

    command: tuple[str, ...] = key(
        (),
        "Program and arguments. It finds address and key of the endpoint in OPENAI_BASE_URL, OPENAI_API_KEY, "
        "ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, and on its standard input, as JSON, `url`, `row` and `seconds`. An "
        "exit status other than 0 is a failed environment.",
    )
    path: str | None = key(
        None,
        "Python file with the function, which is called with url, key, row and seconds, and has the same variables. It "
        "may be async.",
        is_path=True,
    )
    name: str = key("run", "The function.")


class RolloutConfig(Section):
    """Groups of vLLM engines."""

    name: Literal["vllm"] = key("vllm", "The engine.")
    num_engines: int = key(
        1,
        "Independent engines; prompts are spread over them.",
        ge=1,
        le=100_000,
        advice="Many engines of small tensor parallelism generate faster than few of large, and keep "
        "more copies of the weights.",
    )
    tensor_model_parallel_size: int = key(
        1,
        "Over how many devices an engine cuts each matrix.",
        ge=1,
        advice="The smallest for which device memory x gpu_memory_utilization x TP clearly exceeds 2 "
        "bytes a parameter, then one step up: more room for KV cache against more communication. "
        "Above 8 it seldom pays.",
        verl="actor_rollout_ref.rollout.tensor_model_parallel_size",
    )
    data_parallel_size: int = key(
        1,
        "Copies of attention inside one engine; its experts are shared among all of them. Of models with experts only.",
        ge=1,
        advice="1 where an engine fits a node; above, it lets experts spread over more devices than a node has.",
        verl=("actor_rollout_ref.rollout.data_parallel_size", "actor_rollout_ref.rollout.dp_model_parallel_size"),
    )
    expert_parallel_size: int = key(
        1,
        "1, or all workers of an engine (tensor x data): each then holds whole experts.",
        ge=1,
        advice="Measure it: with few sequences a wide spread is slower.",
        verl="actor_rollout_ref.rollout.expert_parallel_size",
    )
    dtype: Dtype | None = key(
        None,
        "Number format of the engines; left out: the model's.",
        advice="The model's: another one generates from another policy.",
    )
    quantization: Literal["fp8"] | None = key(
        None,
        "fp8: engines hold linear layers and experts as 8-bit words (e4m3) with a float32 scale a block, made of the "
        "trained weights in every weight sync; left out: engines hold weights as they are trained.",
        advice="fp8 halves the engines' weights and the bytes of a sync, and generates from a slightly other policy: "
        "algorithm.rollout_correction.level is then token (TIS) where it is not set. With it, look at the metrics "
        "under rollout_corr.",
        verl="actor_rollout_ref.rollout.quantization",
    )
    quantization_block: int = key(
        BLOCK,
        "Rows and columns that one scale is of.",
        ge=1,
        le=BLOCK,
        advice="128, as devices' kernels have it; a smaller one is for small models on a CPU.",
    )
    n: int = key(
        8,
        "Responses per prompt; the group that advantages are relative to.",
        ge=1,
        le=100_000,
        advice="8 to 16; DAPO uses 16, GRPO's first paper 64.",
        verl="actor_rollout_ref.rollout.n",
    )
    temperature: float = key(
        1.0,
        "Of training responses.",
        ge=0.01,
        advice="1.0: exploration, and log-probs mean the same on both sides.",
        verl="actor_rollout_ref.rollout.temperature",
    )
    top_p: float = key(
        1.0,
        "Nucleus of training responses.",
        gt=0,
        le=1,
        verl="actor_rollout_ref.rollout.top_p",
        advice="1.0: training sees the whole distribution. Below it the mismatch metrics say less, and neither a "
        "rollout_correction nor anchor: rollout is possible.",
    )
    top_k: int = key(
        -1,
        "Candidates of training responses; -1: all.",
        advice="-1, for the reasons of top_p.",
        rule=_NO_FILTER,
    )
    gpu_memory_utilization: float = key(
        0.8,
        "Share of a device's memory that an engine takes, weights and KV cache together.",
        gt=0,
        le=1,
        advice="As high as runs without running out: 0.8 to 0.9 on devices of its own, 0.5 to 0.7 beside a "
        "trainer that is not offloaded.",
        verl="actor_rollout_ref.rollout.gpu_memory_utilization",
    )
    cpu_kvcache_gib: int = key(1, "KV cache of each worker of an engine on a CPU.", ge=1, unit="GiB")
    max_num_seqs: int = key(
        256,
        "Sequences that an engine, or each data-parallel rank of it, works on at once.",
        ge=1,
        advice="Raise it while the engine's KV cache is not full.",
        verl="actor_rollout_ref.rollout.max_num_seqs",
    )
    max_num_batched_tokens: int | None = key(
        None,
        "Tokens of one engine step.",
        ge=1,
        unit="tokens",
        advice="max(8192, max_prompt_length + max_response_length) is a good start; below 2048 throughput suffers.",
        verl="actor_rollout_ref.rollout.max_num_batched_tokens",
    )
    enforce_eager: bool | None = key(
        None,
        "No captured graphs; left out: as the device has it.",
        advice="true only when memory is short or a graph fails.",
        verl="actor_rollout_ref.rollout.enforce_eager",
    )
    enable_prefix_caching: bool = key(
        True,
        "Responses of one prompt share its KV cache; emptied after every weight sync.",
        verl="actor_rollout_ref.rollout.enable_prefix_caching",
    )
    enable_chunked_prefill: bool | None = key(
        None,
        "Long prompts are read in parts; left out: as the device has it.",
        advice="true on accelerators; always off on a CPU, whose build of vLLM dies of it.",
        verl="actor_rollout_ref.rollout.enable_chunked_prefill",
    )
    calculate_log_probs: bool = key(
        True,
        "The engine returns the log-prob of each sampled token; metrics of mismatch and corrections need them.",
    )
    start_timeout_s: float = key(900.0, "Longest wait for the engines to start.", gt=0, unit="s")
    generate_timeout_s: float = key(
        3600.0,
        "Longest time that an engine with requests may make no token; while all of them wait for tools it has none to "
        "make.",
        gt=0,
        unit="s",
    )
    restart_limit: int = key(
        3,
        "Times that an engine which is killed or stands still is started again inside the run, in 100 finished steps; "
        "past it the others go on. 0: its loss ends the run, to be resumed.",
        ge=0,
        advice="0 where whoever submits the run restarts it anyway.",
    )
    min_engines: int = key(
        1,
        "Engines that a run goes on with at least; below it ends, resumable.",
        ge=1,
        advice="As many as keep a step from taking longer than a restart of the run.",
    )
    engine_kwargs: dict[str, dict[str, Any]] = key(
        {},
        "`vllm:` with arguments of vLLM that no key here has; checked against the real ones.",
        advice="cudagraph_capture_sizes: [1, 2, 4, 8, 16, 32] gives memory back. vLLM's pipeline "
        "parallelism is not supported.",
    )
    val_kwargs: ValSamplingConfig = ValSamplingConfig()
    turns: TurnsConfig | None = None
    endpoint: bool = key(
        False,
        "Each engine has a chat endpoint on loopback, in OpenAI's form and in Anthropic's, over which an agent of your "
        "own speaks to the model; all that it brings about is one response. The agent's budgets are those of "
        "rollout.turns.",
    )
    agent: AgentConfig | None = None

    @property
    def vllm_kwargs(self) -> dict[str, Any]:
        """Arguments of vLLM that no key here has."""
        return self.engine_kwargs.get("vllm", {})

    def weights_dtype(self, model_dtype: str) -> str:
        """Number format of the engines' weights: their own, else the model's."""
        return self.dtype or model_dtype

    @property
    def fp8_block(self) -> int:
        """Rows and columns that have one scale where engines hold words; 0: they hold none."""
        return self.quantization_block if self.quantization else 0

    @property
    def workers_per_engine(self) -> int:
        """Devices that one engine takes."""
        return self.tensor_model_parallel_size * self.data_parallel_size
