"""What the tests share: tiny random models, engines kept for the session, and the rule that CI skips nothing it could run."""

import os
import pathlib
import sys

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as run_async.py, which says why

# Nothing but torch-free modules is imported here, so that `pytest --collect-only` is quick.

ARCHITECTURES = ["qwen2", "qwen3", "qwen3-untied", "llama", "qwen3-moe"]


# ---------------------------------------------------------------------------------------------------------------------
# With CI=true a skip counts as a failure, unless the machine lacks a GPU


def pytest_configure(config):
    config.unexcused = []  # (test, reason) of skips that CI does not accept


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import kernels_cuda

        if kernels_cuda.choose_devices()[0] == "cpu":  # no GPU, or vLLM's CPU build
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def _note_skip(config, report):
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if not reason.startswith("needs CUDA"):
            config.unexcused.append((report.nodeid, reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    _note_skip(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield  # a whole file can be skipped: importorskip, skip(allow_module_level=True)
    _note_skip(collector.config, report)
    return report


def pytest_sessionfinish(session, exitstatus):
    if os.environ.get("CI") == "true" and session.config.unexcused and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if os.environ.get("CI") == "true":
        for test, reason in config.unexcused:
            terminalreporter.write_line(f"FAILED {test}: skipped in CI ({reason}); only \"needs CUDA...\" may be", red=True)


class Beside:
    """Files in ../shared/data, beside the checkout. A test that asks for one is skipped where they are not; CI has them."""

    folder = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"

    def __truediv__(self, name: str) -> pathlib.Path:
        if not self.folder.is_dir():
            pytest.skip("needs ../shared/data beside the checkout")
        return self.folder / name


# ---------------------------------------------------------------------------------------------------------------------
# Threads, models, engines


@pytest.fixture(autouse=True)
def one_thread():
    """Each test starts with one torch thread; a test may set two."""
    import torch

    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base_model() -> pathlib.Path:
    """The embedded base model, made if the cache lacks it (about a minute)."""
    import base

    return base.make_base(progress=False)


def make_tiny(arch: str, dtype: str, path: pathlib.Path) -> None:
    """Save a random model of two layers and 128 tokens: wide enough weights that it has preferences, norm weights that
    are not 1 and, in Qwen2, biases that are not 0."""
    import torch
    import transformers as hf

    # between them: head sizes 32 and 64, 2 and 4 query heads per key head, tied and untied heads, and intermediate
    # sizes on both sides of the switch in kernels.swiglu
    size = dict(vocab_size=128, num_hidden_layers=2, max_position_embeddings=1024, initializer_range=0.12, bos_token_id=None,
                eos_token_id=0, pad_token_id=None)  # fmt: skip
    shape = {
        "qwen2": dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256),
        "qwen3": dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=192),
        "qwen3-untied": dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64, intermediate_size=128),
        "llama": dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=1, intermediate_size=320),
        "qwen3-moe": dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, moe_intermediate_size=96,
                          num_experts=6, num_experts_per_tok=3, norm_topk_prob=True),
    }[arch]
    name = {"qwen2": "Qwen2", "llama": "Llama", "qwen3-moe": "Qwen3Moe"}.get(arch, "Qwen3")
    config = getattr(hf, f"{name}Config")(**size, **shape, tie_word_embeddings=arch in ("qwen3", "qwen3-moe"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(ARCHITECTURES.index(arch))
        model = getattr(hf, f"{name}ForCausalLM")(config)
        for key, p in model.named_parameters():
            if key.endswith("bias"):
                torch.nn.init.normal_(p, std=0.3)
            elif "norm" in key:
                torch.nn.init.normal_(p, mean=1.0, std=0.15)
    model.to(getattr(torch, dtype)).save_pretrained(path)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(arch, dtype) -> folder of a tiny random model; arch is one of ARCHITECTURES."""
    made = {}

    def of(arch: str, dtype: str) -> str:
        if (arch, dtype) not in made:
            path = tmp_path_factory.mktemp("model") / f"{arch}-{dtype}"
            make_tiny(arch, dtype, path)
            made[arch, dtype] = str(path)
        return made[arch, dtype]

    return of


@pytest.fixture(scope="session")
def engine():
    """engine(model, dtype, kernels_mode) -> rollout.Engine, made once per session, holding its model as version 0.

    A test that patches kernels.py gives a `variant` to get an engine of its own. None is closed before the end: vLLM's
    process groups belong to the process, and closing one engine breaks the others.
    """
    engines, weights = {}, {}

    def of(model, dtype: str, kernels_mode: str = "aligned", variant: str = ""):
        import torch
        from transformers import AutoModelForCausalLM

        from rollout import Engine

        key = str(model), dtype, kernels_mode, variant
        if key not in engines:
            sizes = dict(max_model_len=1024, max_seqs=64, gpu_memory_utilization=0.1)  # of one GPU for up to eight engines
            parallel_state = sys.modules.get("vllm.distributed.parallel_state")
            # vLLM makes the expert-parallel group with the process' first engine, and only if that is a mixture of experts
            if parallel_state and parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
                parallel_state._EP = parallel_state.init_model_parallel_group([[0]], 0, "gloo", group_name="ep")
            engines[key] = Engine(key[0], dtype, kernels_mode, stop_ids={0}, **sizes)
            loaded = AutoModelForCausalLM.from_pretrained(key[0], dtype=getattr(torch, dtype))
            weights[key] = {name: p.detach().clone() for name, p in loaded.named_parameters()}
        engines[key].load(weights[key], 0)  # whatever another test left in it
        torch.set_num_threads(1)
        return engines[key]

    yield of
    for made in engines.values():
        made.close()
