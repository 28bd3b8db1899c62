"""Keys of the rollout engines."""

from pathlib import Path
from typing import Any, Literal

from mrl.config.schema_actor import Dtype
from mrl.config.section import Section, key, must_be
from mrl.model.quantised import BLOCK
from mrl.units import MOST_DEVICES

_NO_FILTER = must_be(lambda k: k == -1 or k >= 1, "must be -1 (no filter) or at least 1", "so many tokens are left", -1)


class ValSamplingConfig(Section):
    """Sampling of validation responses."""

    n: int = key(
        1,
        "Validation responses per prompt.",
        ge=1,
        le=100_000,
        advice="32 or 64 for small sets such as AIME: few problems need many responses.",
        verl="actor_rollout_ref.rollout.val_kwargs.n",
    )
    temperature: float = key(
        1.0,
        "Sampling temperature of validation responses.",
        ge=0,
        advice="Above 0 for models with long reasoning, which repeat themselves at 0.",
        verl="actor_rollout_ref.rollout.val_kwargs.temperature",
    )
    top_p: float = key(
        1.0,
        "Nucleus sampling of validation responses: the probability mass that is kept.",
        gt=0,
        le=1,
        advice="0.7 to 1.",
        verl="actor_rollout_ref.rollout.val_kwargs.top_p",
    )
    top_k: int = key(
        -1,
        "Most likely tokens that validation responses are sampled from; -1: all.",
        rule=_NO_FILTER,
    )


class PythonConfig(Section):
    """Limits of one program that the shipped tool python runs."""

    max_seconds: float = key(5.0, "Longest run of a program. After it the program is killed.", gt=0, unit="s")
    max_memory_gib: float = key(1.0, "Address space of a program.", gt=0, unit="GiB")
    max_files_mib: float = key(
        16.0, "Size of all files in a program's folder, which is removed when it ends.", gt=0, unit="MiB"
    )
    unconfined: bool = key(
        False,
        "Lets programs run on machines that cannot confine them. They then have the user's network, files and "
        "processes. With false such a machine is refused. Linux with Landlock and seccomp can confine; `mrl "
        "doctor` checks it.",
        advice="false: the programs are written by a model.",
    )


class SandboxConfig(Section):
    """Sandboxes of the shipped environment repository: a root that is read, and folders that are written."""

    backend: Literal["bubblewrap", "docker", "e2b", "modal", "daytona"] = key(
        "bubblewrap",
        "What starts them. bubblewrap: a root folder on the engine's node (the program bwrap, of the package "
        "bubblewrap). docker: an image, by the daemon of Docker or Podman. The others: by their providers' clients.",
        advice="bubblewrap needs no daemon, docker takes images of data sets. `mrl doctor` tries both. e2b, modal and "
        "daytona were never tried.",
    )
    image: str | None = key(
        None, "Image, or with bubblewrap the absolute path of a root folder, of rows that name none in extra_info.task."
    )
    folder: str = key("/workspace", "Folder inside where commands run, of rows that name none.")
    address: str | None = key(
        None,
        "Address of the daemon, such as unix:///run/podman/podman.sock. Left out: DOCKER_HOST, or Docker's own.",
    )
    network: str | None = key(
        None,
        "Network that commands reach: `host` with bubblewrap, the name of a network with docker, anything with the "
        "others. Left out: none, except for the chat endpoint where an agent runs inside.",
        advice="Left out: code that a model writes then has no network.",
    )
    max_memory_gib: float = key(2.0, "Memory of all processes of a sandbox together.", gt=0, unit="GiB")
    max_processes: int = key(256, "Processes and threads of a sandbox.", ge=8)
    max_disk_mib: float = key(
        512.0, "Content of all folders that a sandbox writes. It lies in memory.", ge=1, unit="MiB"
    )
    max_command_seconds: float = key(5.0, "Longest run of one command of the model.", gt=0, unit="s")
    max_test_seconds: float = key(300.0, "Longest run of a row's setup, and of its tests.", gt=0, unit="s")


class TurnsConfig(Section):
    """Tools and environments that the model may use while it answers. A response is then a conversation of several
    turns.
    """

    tools: tuple[str, ...] = key(
        (),
        "Names of tools: shipped ones (calculator, python, search), and functions of the file under path.",
        advice="Few tools. The model reads their docstrings, so each docstring should say when to call the tool.",
    )
    environments: tuple[str, ...] = key(
        (),
        "Names of environments: shipped ones (guess_the_number, textarena, verl_tools, repository), and classes of "
        "the file under path. With several of them each row names its own in extra_info.environment.",
    )
    mcp_servers: dict[str, dict[str, Any]] = key(
        {},
        "MCP servers whose tools the model may call, by a name of yours. Each has a `command` (a list; the server "
        "speaks over its standard input and output) or a `url` (streamable HTTP, which needs network: true), and may "
        "have `tools` (names of those to offer; left out: all), `prefix` (put before their names) and `headers` (of "
        "HTTP: a name, and the variable of the environment that holds its value).",
        advice="Servers whose answers depend on the call alone: each process of tools has its own, for all responses. "
        "`pip install 'mrl[mcp]'` brings the client.",
    )
    path: str | None = key(
        None,
        "Python file with your tools and environments: typed functions with a docstring, and subclasses of "
        "mrl.acting.environment.Environment. It runs in separate processes.",
        is_path=True,
    )
    index: str | None = key(
        None,
        "File that the shipped tool search finds passages in. scripts/make_search_index.py writes it from JSON lines.",
        is_path=True,
    )
    tool_config_path: str | None = key(
        None,
        "verl's file of tools (classes of its BaseTool), which the shipped environment verl_tools loads.",
        is_path=True,
    )
    python: PythonConfig = PythonConfig()
    sandbox: SandboxConfig | None = None
    max_turns: int = key(
        8,
        "Most turns of a response. Calls in the last turn are not made.",
        ge=1,
        advice="A response that calls a tool in its last turn ends there, and is scored as it is.",
    )
    max_calls: int = key(4, "Most calls that one turn may make. Further calls are answered with an error.", ge=1)
    max_seconds: float = key(
        600.0,
        "Time for the calls of all turns of a response together. A turn's time runs from its calls until the "
        "last one is answered. It includes waiting for a free process, not generation. After it the response "
        "ends.",
        gt=0,
        unit="s",
        advice="Well above the time that all calls take: what a clock ends cannot be repeated.",
    )
    max_answer_characters: int = key(
        4000,
        "Longest answer of a tool. A longer answer is cut in the middle, and the cut is marked in it.",
        ge=1,
        unit="characters",
        advice="Answers count towards data.max_response_length.",
    )
    timeout_s: float = key(
        10.0,
        "Deadline of one call, after which its process is killed. A tool's call is then answered with an "
        "error. An environment then counts as failed (reward.max_failure_share). All that an agent does "
        "between two requests is one call.",
        gt=0,
        unit="s",
    )
    num_workers: int = key(
        2,
        "Processes of each engine (with data parallelism, of each of its ranks) that call tools, and as many again "
        "that run environments. With rollout.endpoint: agents that run at the same time there.",
        ge=1,
    )
    max_memory_gib: float | None = key(
        None, "Address space of one such process; left out: unlimited.", gt=0, unit="GiB"
    )
    environment: tuple[str, ...] = key(
        (),
        "Environment variables that these processes get beside the usual ones (PATH, HOME, PYTHON*, ...), by "
        "name or pattern. One use is the key of a search service.",
    )
    network: bool = key(
        False, "Lets these processes open network sockets, to this host too; an agent needs it. false needs Linux."
    )
    folders: tuple[str, ...] = key(
        (),
        "Folders that these processes may write into beside temporary ones. The limit needs Linux with "
        "Landlock. Without it they can write wherever the user can, and their log says so.",
    )

    @property
    def runs_programs(self) -> bool:
        """Whether a tool runs programs of the model: the shipped one, or one of verl's."""
        from mrl.acting.python_tool import PYTHON
        from mrl.acting.verl_tool_config import VERL_TOOLS

        return PYTHON in self.tools or VERL_TOOLS in self.environments


NGRAM, MTP = "ngram", "mtp"  # rollout.speculation.method; any other word is a head's folder
AUTO = "auto"  # rollout.speculation.tokens
MOST_AUTO = 6  # tokens among which a plan finds the best number


class SpeculationConfig(Section):
    """Speculative decoding: tokens are drafted cheaply, and the model checks several of them in one step.

    Responses keep the model's distribution, and log-probs are the model's.
    """

    method: str = key(
        ...,
        "What drafts. ngram: the tokens that followed an earlier occurrence of the newest ones. mtp: the checkpoint's "
        "layer for multi-token prediction, which every weight sync brings; actor.mtp.train trains it along. Any other "
        "word is the folder of an EAGLE-3 head for this model, in safetensors; it stays as it is.",
        advice="ngram pays where answers repeat their prompt or themselves, as edits of code do. Else watch "
        "drafts/acceptance, which falls as the policy moves away from a head that is not trained along.",
    )
    tokens: int | Literal["auto"] = key(
        ...,
        "Most tokens drafted for a response in one step. auto: the number with which mrl plan predicts the fastest "
        "generation, and only in batches in which it predicts that drafts pay.",
        rule=must_be(lambda v: v == AUTO or 1 <= v <= 32, "must be 1 to 32, or auto", "so many are drafted at most"),
        unit="tokens",
        advice="2 to 4. Drafts cost computing that large batches lack: see mrl plan, and watch drafts/tokens_per_step "
        "and timing_s/gen.",
    )
    max_num_seqs: int | None = key(
        None,
        "Most responses that an engine decodes at once while it drafts. In larger batches it drafts none. null: it "
        "always drafts; with tokens: auto, what mrl plan finds.",
        ge=1,
        unit="sequences",
        advice="mrl plan says up to which number drafts pay.",
    )
    draft_sample_method: Literal["greedy", "probabilistic"] = key(
        "greedy",
        "Which token the predicting layer drafts: its most likely one, or one sampled at the response's temperature, "
        "which is accepted by the ratio of both distributions. Responses have the model's distribution either way.",
        advice="greedy where the model is sure of most tokens; compare drafts/acceptance of both.",
    )
    lookup: int = key(
        3,
        "Fewest newest tokens that must have occurred before, for ngram to draft.",
        ge=1,
        le=64,
        unit="tokens",
        advice="2 to 5. Fewer draft more often, and more drafts are wrong.",
    )

    @property
    def head(self) -> Path | None:
        """Folder of the head that drafts; None where none does."""
        return None if self.method in (NGRAM, MTP) else Path(self.method)

    @property
    def most(self) -> int:
        """Upper bound of `tokens`."""
        return MOST_AUTO if self.tokens == AUTO else self.tokens


class AgentConfig(Section):
    """An agent of your own, started once for each response. It is a command, or a function of a Python file."""

    command: tuple[str, ...] = key(
        (),
        "Program and arguments. Environment variables hold the endpoint's address and key: OPENAI_BASE_URL, "
        "OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. Standard input has `url`, `row`, "
        "`seconds` and `reward_key` as JSON. An exit status other than 0 counts as a failed environment.",
    )
    path: str | None = key(
        None,
        "Python file with the function. It is called with url, key, row and seconds, and with reward_key if it has "
        "that parameter. It has the same environment variables, and may be async.",
        is_path=True,
    )
    name: str = key("run", "Name of the function in that file.")
    harness: Literal["claude_code", "codex", "mini_swe_agent", "plain", "verifiers"] | None = key(
        None,
        "An agent of others by name, instead of a command or a path: its command line, its configuration and variables "
        "are mrl's. Its task is the text of the row's messages. plain: a loop with a shell. verifiers: an environment "
        "of that package, whose rows are made by scripts/make_rows.py.",
        advice="Versions that were tried: docs/tools.md.",
    )
    program: str | None = key(
        None,
        "Program of the harness; left out: the one of its own name. For plain and verifiers an interpreter of Python.",
    )
    arguments: tuple[str, ...] = key((), "Further arguments of the harness's program, behind mrl's own.")
    harness_config: dict[str, Any] = key(
        {},
        "What is merged into the harness's own configuration: settings.json of Claude Code, config.toml of Codex, the "
        "YAML of mini-swe-agent; of plain `seconds` and `most` (characters) of a command; of verifiers the whole "
        "environment, as under [env] of its TOML.",
    )
    in_sandbox: bool = key(
        False,
        "Runs the command or the harness in a sandbox (rollout.turns.sandbox) of the row's image, or of the "
        "sandbox's own. A row with extra_info.task gets its tests' reward.",
        advice="true where the agent runs commands that the model writes.",
    )
    max_requests: int = key(
        8,
        "Most requests of one session that are answered at once. Further ones wait.",
        ge=1,
        advice="Each takes a place of the engine, beside those of other sessions.",
    )
    keeps_all_answers: bool = key(
        False,
        "Trains all answers to a repeated request. false: of these only the answer from which the conversation "
        "continues, or the newest.",
        advice="true where the agent repeats requests to compare answers, and one reward covers all of them.",
    )
    enforces_tool_choice: bool = key(
        False,
        "Begins a call for the model if a request has the tool_choice required, any or one tool. The beginning is "
        "context; what the model then samples is trained. false: the choice is counted as overridden.",
        advice="true for agents that demand structured answers by a named tool.",
    )


class RolloutConfig(Section):
    """The vLLM engines, and how they sample."""

    name: Literal["vllm"] = key("vllm", "Name of the inference engine.")
    num_engines: int = key(
        1,
        "Number of independent engines. Prompts are spread over them.",
        ge=1,
        le=MOST_DEVICES,
        advice="Many engines of small tensor parallelism generate faster than few of large. They hold more copies of "
        "the weights.",
    )
    tensor_model_parallel_size: int = key(
        1,
        "Devices over which an engine cuts each weight matrix.",
        ge=1,
        advice="Find the smallest size for which device memory x gpu_memory_utilization x TP clearly exceeds 2 bytes "
        "a parameter. Then take one step up: it trades communication for KV cache. Above 8 it seldom pays.",
        verl="actor_rollout_ref.rollout.tensor_model_parallel_size",
    )
    data_parallel_size: int = key(
        1,
        "Copies of attention inside one engine, which share its experts. Only for models with experts.",
        ge=1,
        advice="1 where an engine fits a node. Larger sizes spread experts over more devices than a node has.",
        verl=("actor_rollout_ref.rollout.data_parallel_size", "actor_rollout_ref.rollout.dp_model_parallel_size"),
    )
    expert_parallel_size: int = key(
        1,
        "1, or the number of an engine's workers (tensor x data parallel size). Each worker then holds whole experts.",
        ge=1,
        advice="Measure it: with few sequences a wide spread is slower.",
        verl="actor_rollout_ref.rollout.expert_parallel_size",
    )
    dtype: Dtype | None = key(
        None,
        "Number format of the engines; left out: model.dtype.",
        advice="Left out: another format generates from another policy.",
    )
    quantization: Literal["fp8"] | None = key(
        None,
        "fp8: engines hold linear layers and experts as 8-bit values (e4m3), with a float32 scale a block. "
        "Each weight sync makes them from the trained weights. Left out: engines hold weights in the trained "
        "format.",
        advice="fp8 halves the engines' weights and the bytes of a sync. It generates from a slightly different "
        "policy, so algorithm.rollout_correction.level becomes token (TIS) where it is not set and may be. Watch the "
        "metrics under rollout_corr.",
        verl="actor_rollout_ref.rollout.quantization",
    )
    tuned_experts: str | None = key(
        None,
        "Folder with configurations of vLLM's kernel of fused experts, which scripts/tune_experts.py measures on your "
        "device. Engines read it before vLLM's own.",
        is_path=True,
        advice="Give one where `mrl plan` says that vLLM has no configuration for the experts of a worker: it then "
        "takes a default, which is slower in decode steps.",
    )
    quantization_block: int = key(
        BLOCK,
        "Rows and columns of the block that shares one scale.",
        ge=1,
        le=BLOCK,
        advice="128, which kernels on devices need. Smaller blocks are for small models on a CPU.",
    )
    n: int = key(
        8,
        "Responses per prompt. They form the group that advantages are relative to.",
        ge=1,
        le=100_000,
        advice="8 to 16. DAPO uses 16, GRPO's first paper 64.",
        verl="actor_rollout_ref.rollout.n",
    )
    temperature: float = key(
        1.0,
        "Sampling temperature of training responses.",
        ge=0.01,
        advice="1.0: it keeps exploration, and log-probs of engine and trainer mean the same.",
        verl="actor_rollout_ref.rollout.temperature",
    )
    top_p: float = key(
        1.0,
        "Nucleus sampling of training responses: the probability mass that is kept.",
        gt=0,
        le=1,
        verl="actor_rollout_ref.rollout.top_p",
        advice="1.0: training sees the whole distribution. Below 1 the mismatch metrics say less. rollout_correction "
        "and anchor: rollout are then refused.",
    )
    top_k: int = key(
        -1,
        "Most likely tokens that training responses are sampled from; -1: all.",
        advice="-1, for the reasons given at top_p.",
        rule=_NO_FILTER,
    )
    gpu_memory_utilization: float = key(
        0.8,
        "Share of a device's memory that an engine takes for weights, passes, captured graphs (on CUDA) and KV cache.",
        gt=0,
        le=1,
        advice="As high as works without running out of memory: 0.8 to 0.9 on separate devices, 0.5 to 0.7 beside a "
        "trainer that is not offloaded.",
        verl="actor_rollout_ref.rollout.gpu_memory_utilization",
    )
    cpu_kvcache_gib: int = key(1, "KV cache of each worker of an engine on a CPU.", ge=1, unit="GiB")
    max_num_seqs: int = key(
        256,
        "Sequences that an engine computes at once. With data parallelism each of its ranks computes as many.",
        ge=1,
        advice="Raise it while the engine's KV cache is not full.",
        verl="actor_rollout_ref.rollout.max_num_seqs",
    )
    max_num_batched_tokens: int | None = key(
        None,
        "Most tokens in one engine step; left out: the device's default.",
        ge=1,
        unit="tokens",
        advice="Start with max(8192, max_prompt_length + max_response_length). Below 2048 throughput suffers.",
        verl="actor_rollout_ref.rollout.max_num_batched_tokens",
    )
    enforce_eager: bool | None = key(
        None,
        "Runs engines without captured graphs; left out: the device's default.",
        advice="true only where memory is short or a graph fails.",
        verl="actor_rollout_ref.rollout.enforce_eager",
    )
    enable_prefix_caching: bool = key(
        True,
        "Lets responses to one prompt share its KV cache. The cache is emptied after every weight sync.",
        verl="actor_rollout_ref.rollout.enable_prefix_caching",
    )
    enable_chunked_prefill: bool | None = key(
        None,
        "Reads long prompts in parts; left out: the device's default.",
        advice="true on accelerators. It is always off on a CPU, where vLLM's build crashes with it.",
        verl="actor_rollout_ref.rollout.enable_chunked_prefill",
    )
    calculate_log_probs: bool = key(
        True,
        "Lets the engine return the log-prob of each sampled token. Mismatch metrics and corrections need them. "
        "It must be true.",
    )
    start_timeout_s: float = key(900.0, "Longest wait for the engines to start.", gt=0, unit="s")
    generate_timeout_s: float = key(
        3600.0,
        "Longest time that an engine with requests may produce no token. It does not run while all requests "
        "wait for tools.",
        gt=0,
        unit="s",
    )
    restart_limit: int = key(
        3,
        "Restarts inside the run, in 100 finished steps, of an engine that was killed or does not respond. After "
        "them the other engines go on without it. 0: the loss of an engine ends the run, which can be "
        "resumed.",
        ge=0,
        advice="0 where whoever submits the run restarts it anyway.",
    )
    min_engines: int = key(
        1,
        "Fewest engines that a run goes on with. With fewer it ends and can be resumed.",
        ge=1,
        advice="As many as keep a step shorter than a restart of the run.",
    )
    engine_kwargs: dict[str, dict[str, Any]] = key(
        {},
        "A mapping `vllm:` with arguments of vLLM that have no key here. They are checked against vLLM's own.",
        advice="cudagraph_capture_sizes: [1, 2, 4, 8, 16, 32] frees memory. vLLM's pipeline parallelism is not "
        "supported.",
    )
    val_kwargs: ValSamplingConfig = ValSamplingConfig()
    speculation: SpeculationConfig | None = None
    turns: TurnsConfig | None = None
    endpoint: bool = key(
        False,
        "Gives each engine a chat endpoint on loopback, in OpenAI's and Anthropic's format. Your agent talks "
        "to the model through it. All that one agent does is one response. Limits of the agent are in "
        "rollout.turns.",
    )
    agent: AgentConfig | None = None

    @property
    def drafted_by(self) -> str:
        """The method of speculation; empty where there is none."""
        return "" if self.speculation is None else self.speculation.method

    @property
    def drafts_with_model(self) -> bool:
        """Whether the checkpoint's predicting layers draft: ranks hold them, and weight syncs bring them."""
        return self.drafted_by == MTP

    @property
    def vllm_kwargs(self) -> dict[str, Any]:
        """Arguments of vLLM that have no key here."""
        return self.engine_kwargs.get("vllm", {})

    def weights_dtype(self, model_dtype: str) -> str:
        """Returns the number format of the engines' weights: rollout.dtype, or the model's where it is left out."""
        return self.dtype or model_dtype

    @property
    def fp8_block(self) -> int:
        """Rows and columns that share one scale where engines hold FP8 words, else 0."""
        return self.quantization_block if self.quantization else 0

    @property
    def workers_per_engine(self) -> int:
        """Devices that one engine takes."""
        return self.tensor_model_parallel_size * self.data_parallel_size
