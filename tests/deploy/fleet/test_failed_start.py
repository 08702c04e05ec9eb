"""The cause of a failed engine start, read from its log."""

from deploy.fleet.servers import last_exception

_REPORTED = "failed: RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
_LOG = [
    "(EngineCore pid=71) WARNING 11-24 19:02:11 [cpu.py:40] VLLM_CPU_KVCACHE_SPACE not set. Using 4 GiB.",
    "(EngineCore pid=71) ERROR 11-24 19:02:12 [core.py:843] Traceback (most recent call last):",
    "(EngineCore pid=71) ERROR 11-24 19:02:12 [core.py:843] RuntimeError: Unsupported configuration: head_dim=16",
    "(EngineCore pid=71) INFO 11-24 19:02:13 [core.py:900] the process ends",
    "(MainProcess pid=70) ERROR 11-24 19:02:13 [async_llm.py:906] vllm.EngineDeadError: EngineCore met an issue.",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    "[W1124 NUMA is not available",
]


def test_cause_is_the_engines_last_exception_and_not_its_parents_report() -> None:
    assert last_exception(_LOG, _REPORTED, 70) == "RuntimeError: Unsupported configuration: head_dim=16"


def test_log_without_another_exception_has_no_cause() -> None:
    assert last_exception([_LOG[0], *_LOG[4:]], _REPORTED, 70) == ""
