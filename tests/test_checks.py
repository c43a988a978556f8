"""`python kernels.py`: every check passes on every architecture, every check fails when what it checks is broken, and the locator
names the operation that was broken."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

import checks
import kernels
import rollout
from conftest import ARCHITECTURES
from learn import Learner

kernels.load_ops()
TOOL = pathlib.Path(__file__).parents[1].parent / "shared" / "tools" / "get_smollm2.py"


@pytest.fixture
def subject(tiny, engine):
    def of(arch="qwen3", dtype="bfloat16", mode="aligned", **options):
        path = tiny(arch, dtype)
        learner = Learner(path, dtype, mode, allow_mismatch=True)
        return checks.Subject(learner, engine(path, dtype, mode), **{"tokens": 1000} | options)

    return of


@pytest.fixture
def broken():
    """broken(module, change, rows=None): the module's outputs go through `change` when it is given that many rows."""
    handles = []

    def of(module, change, rows=None):
        def hook(module, args, out):
            first = args[-1] if args else None
            return change(out) if rows is None or len(first) == rows else None

        handles.append(module.register_forward_hook(hook))

    yield of
    for handle in handles:
        handle.remove()


def flip(x):
    """x with the last bit of one value turned."""
    x = x.clone()
    bits = x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)
    bits[0].view(-1)[3] ^= 1
    return x


def first(change):
    return lambda out: (change(out[0]), *out[1:])


def second(change):
    return lambda out: (out[0], change(out[1]))


# ---------------------------------------------------------------------------------------------------------------------
# The locator names the operation that was broken


ENGINE_SIDE = [
    # operation, layer, module of the engine, its broken output
    ("embedding", None, "embed_tokens", flip),
    ("input norm", 0, "layers.0.input_layernorm", flip),
    ("q/k/v", 1, "layers.1.self_attn.qkv_proj", first(flip)),
    ("q/k norm", 1, "layers.1.self_attn.q_norm", flip),
    ("q/k norm", 0, "layers.0.self_attn.k_norm", flip),
    ("rotary", 0, "layers.0.self_attn.rotary_emb", second(flip)),
    ("attention", 1, "layers.1.self_attn.attn", flip),
    ("o_proj", 1, "layers.1.self_attn.o_proj", first(flip)),
    ("post-attention residual", 0, "layers.0.post_attention_layernorm", second(flip)),
    ("post-attention norm", 1, "layers.1.post_attention_layernorm", first(flip)),
    ("gate/up", 0, "layers.0.mlp.gate_up_proj", first(flip)),
    ("activation", 1, "layers.1.mlp.act_fn", flip),
    ("down", 0, "layers.0.mlp.down_proj", first(flip)),
    ("input residual", 1, "layers.1.input_layernorm", second(flip)),
    ("final residual", None, "norm", second(flip)),
    ("final norm", None, "norm", first(flip)),
    ("logits", None, "logits_processor", flip),
    ("log-softmax", None, "sampler", second(lambda x: torch.cat([x[:1] * 1.0001, x[1:]]))),
]


@pytest.mark.parametrize("op, layer, name, change", ENGINE_SIDE, ids=lambda x: str(x) if isinstance(x, (str, int)) else "")
def test_locator_names_the_operation_that_is_broken_in_the_engine(subject, broken, op, layer, name, change):
    s = subject()
    runner = s.runner
    modules = {"sampler": runner.sampler.topk_topp_sampler, "logits_processor": runner.model.logits_processor}
    broken(modules[name] if name in modules else runner.model.model.get_submodule(name), change)
    found = checks.locate(s, lengths=(3, 20))
    assert (found["op"], found["layer"]) == (op, layer)
    assert 0 < found["different"] < found["values"]


LABELS = {op for op, *_ in ENGINE_SIDE}

LEARNER_SIDE = [
    ("input norm", 0, "RMSNorm", "llama", lambda out: out if isinstance(out, tuple) else flip(out)),
    ("q/k norm", 0, "RMSNorm", "qwen3", lambda out: flip(out) if len(out[0]) == 32 else out),  # heads are 32 wide
    ("rotary", 0, "Rotary", "qwen2", first(flip)),
    ("attention", 0, "Attention", "qwen3", flip),
    ("post-attention norm", 0, "RMSNorm", "llama", lambda out: first(flip)(out) if isinstance(out, tuple) else out),
    ("post-attention residual", 0, "RMSNorm", "llama", lambda out: second(flip)(out) if isinstance(out, tuple) else out),
    ("q/k/v", 0, "linear", "llama", flip),
    ("logits", None, "linear", "qwen3", lambda x: flip(x) if x.shape[-1] == 128 else x),  # 128 tokens, and no layer so wide
    ("log-softmax", None, "TokenLogprobs", "qwen3-untied", first(lambda x: x * 1.0001)),
]


@pytest.mark.parametrize("op, layer, name, arch, change", LEARNER_SIDE, ids=lambda x: str(x) if isinstance(x, (str, int)) else "")
def test_locator_names_the_operation_that_is_broken_in_the_learner(subject, monkeypatch, op, layer, name, arch, change):
    s, right = subject(arch), getattr(kernels, name)
    s.sync = lambda: None  # a sync would give the engine a broken kernels.linear too
    if isinstance(right, type):
        monkeypatch.setattr(kernels, name, type(name, (), {"apply": staticmethod(lambda *args: change(right.apply(*args)))}))
    else:
        monkeypatch.setattr(kernels, name, lambda *args: change(right(*args)))
    found = checks.locate(s, lengths=(3, 20))
    assert (found["op"], found["layer"]) == (op, layer)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_locator_finds_nothing_when_nothing_is_broken(subject, arch):
    assert checks.locate(subject(arch)) is None


@pytest.mark.parametrize("arch", ["qwen3", "qwen2"])
def test_locator_names_an_operation_of_the_stock_kernels(subject, arch):
    found = checks.locate(subject(arch, mode="standard"))
    assert found["layer"] == 0 and found["op"] in LABELS


# ---------------------------------------------------------------------------------------------------------------------
# Every check fails when what it checks is broken


def run(name, s):
    (full,) = [check for check in checks.CHECKS if check.split()[0] == name]
    tally = checks.run_check(full, s)
    assert bool(tally.different) == bool(tally.fault)
    return tally


def test_c0_fails_with_another_logprobs_mode(subject, monkeypatch):
    s = subject()
    assert run("C0", s).fault is None
    monkeypatch.setattr(s.engine.llm.llm_engine.model_config, "logprobs_mode", "raw_logprobs")
    assert run("C0", s).fault == "logprobs_mode is raw_logprobs, equality needs processed_logprobs"


def test_c1_fails_with_a_tied_head_that_a_sync_left_stale(subject, monkeypatch):
    s = subject("qwen3")
    model, load = s.runner.model, s.engine.load
    stale, tied = model.lm_head.weight.detach().clone(), model.lm_head.weight

    def load_without_head(weights, version):
        model.lm_head.weight = tied
        load(weights, version)
        model.lm_head.weight = torch.nn.Parameter(stale, requires_grad=False)

    monkeypatch.setattr(s.engine, "load", load_without_head)
    assert run("C1", s).fault == "lm_head.weight after a sync of other weights"
    model.lm_head.weight = tied
    monkeypatch.undo()
    assert run("C1", s).fault is None


def test_c1_fails_when_one_part_of_a_merged_matrix_stays_as_it_was(subject, monkeypatch):
    s = subject("qwen2")
    load, name = s.engine.load, "model.layers.1.self_attn.k_proj.bias"
    old = s.learner.weights()[name]
    monkeypatch.setattr(s.engine, "load", lambda weights, version: load(weights | {name: old}, version))
    assert "layers.1.self_attn.k_proj.bias" in run("C1", s).fault


def test_c2_fails_when_a_response_is_retokenised(subject, monkeypatch):
    s, append_turn = subject(), rollout._append_turn

    def retokenised(sample, out):
        turn = append_turn(sample, out)
        sample.response_ids[0] = (sample.response_ids[0] + 1) % 128
        return turn

    monkeypatch.setattr(rollout, "_append_turn", retokenised)
    assert run("C2", s).fault == "token ids"


@pytest.mark.parametrize("rows", [255, 256, 257])
@pytest.mark.parametrize("layer", ["self_attn.qkv_proj", "mlp.down_proj"])
def test_c3_fails_with_a_linear_layer_that_is_wrong_at_one_number_of_rows(subject, broken, rows, layer):
    s = subject()
    broken(s.engine_layers[-1].get_submodule(layer), first(flip), rows)
    tally = run("C3", s)
    assert f": {rows} rows" in tally.fault and tally.different == 6  # three places, one and two threads


def test_c4_fails_with_a_norm_that_is_wrong_at_one_number_of_rows(subject, broken):
    s = subject()
    broken(s.engine_layers[-1].self_attn.k_norm, flip, 43)
    assert "k_norm: 43 rows" in run("C4", s).fault


@pytest.mark.parametrize("module, op, change", [("mlp.act_fn", "SwiGLU", flip), ("self_attn.rotary_emb", "rotary", second(flip))])
def test_c5_fails_with_an_operation_that_is_wrong_at_one_number_of_rows(subject, broken, module, op, change):
    s = subject()
    broken(s.engine_layers[-1].get_submodule(module), change, 33)
    assert f"{op}: 33 rows" in run("C5", s).fault


def break_rows(monkeypatch, s, wrong):
    """The engine's attention sees one token too few in the first row of each request for which wrong(start, end, batch) holds."""
    builder = s.runner.attn_groups[0][0].get_metadata_builder()
    build = builder.build

    def broken_build(common_prefix_len, m, fast_build=False):
        metadata = build(common_prefix_len, m, fast_build)
        ends, starts = m.seq_lens.tolist(), m.query_start_loc.tolist()
        metadata.seq_lens = metadata.seq_lens.clone()
        for i, end in enumerate(ends):
            if wrong(end - starts[i + 1] + starts[i], end, len(ends)):
                metadata.seq_lens[starts[i]] -= 1
        return metadata

    monkeypatch.setattr(builder, "build", broken_build)


@pytest.mark.parametrize(
    "wrong, fault",
    [
        (lambda start, end, batch: start == 129 and end > 130, "in chunks, the second from 129"),
        (lambda start, end, batch: start == 128 and end == 129 and batch == 1, "decode of token 129"),
        (lambda start, end, batch: batch == 44, "decode of 44 sequences"),
    ],
)
def test_c6_fails_at_a_chunk_boundary_a_block_boundary_or_a_batch_size(subject, monkeypatch, wrong, fault):
    s = subject()
    break_rows(monkeypatch, s, wrong)
    assert fault in run("C6", s).fault


def _both_attentions(s, locked, found):
    if not locked:
        kernels.ATTENTION_LOCK = contextlib.nullcontext()
    (tokens,), tally = s.prompts([700]), checks.Tally("", "")
    *_, (qkv, whole) = (of[-2:] for of in checks.operations(s, tokens, "C6") if of[0] == "C6")
    for _ in range(1 if locked else 20):
        checks.attention_at_once(s, tally, tokens, qkv, whole)
        if tally.fault:
            found.value = 1
            return


@pytest.mark.parametrize("locked", [True, False])
def test_c6_fails_with_two_threads_in_attention_without_the_lock(subject, locked):
    s = subject("qwen3-untied")
    context = multiprocessing.get_context("fork")  # a process of its own, which the race may crash
    found = context.Value("i", 0)
    process = context.Process(target=_both_attentions, args=(s, locked, found))
    process.start()
    process.join(20)
    process.kill()  # the race can also end in a loop without end
    process.join()
    assert (found.value == 0 and process.exitcode == 0) == locked


def test_c7_fails_with_a_log_softmax_that_is_wrong_at_one_number_of_rows(subject, broken):
    s = subject()
    sampler = s.runner.sampler.topk_topp_sampler
    handle = sampler.register_forward_hook(lambda m, args, out: second(flip)(out) if len(args[0]) == 129 else None)
    try:
        assert "log-softmax, temperature 1.0: 129 rows" in run("C7", s).fault
    finally:
        handle.remove()


def test_c8_fails_when_44_sequences_at_once_are_wrong_where_43_are_right(subject, broken):
    s = subject()
    broken(s.runner.model.model.layers[1].mlp.down_proj, first(lambda x: x * 1.02), 44)
    assert run("C8", s).fault == "decode of 44 sequences at once against prefill"


def test_c8_fails_when_the_blocks_of_a_preempted_request_are_taken_for_its_own(subject, monkeypatch):
    s = subject()
    preempt = s.scheduler._preempt_request

    def stomped(request, *rest, **more):  # as if another request had written there, and the cache still knew the blocks
        (blocks,) = s.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        preempt(request, *rest, **more)
        for cache in s.runner.kv_caches:
            cache[blocks] *= 1.5

    monkeypatch.setattr(s.scheduler, "_preempt_request", stomped)
    assert "after preemption and block reuse" in run("C8", s).fault


def test_c8_fails_when_a_prefix_cache_hit_reads_other_values(subject, monkeypatch):
    s = subject()
    break_rows(monkeypatch, s, lambda start, end, batch: start == 128 and end > 145)
    assert run("C8", s).fault.startswith("prefix-cache hit against miss")


def test_attention_and_cache_checks_pass_with_small_blocks_as_on_a_gpu(tiny, engine, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 32)
    path = tiny("qwen3", "bfloat16")
    s = checks.Subject(Learner(path), engine(path, "bfloat16", variant="small blocks"), threads=2)
    assert s.block == 32 and run("C6", s).fault is None and run("C8", s).fault is None


def test_c9_fails_with_an_engine_that_computes_something_else(subject, broken):
    s = subject()
    broken(s.runner.model.model.layers[1].self_attn.o_proj, first(lambda x: x * 1.02))
    assert run("C9", s).fault.startswith("batch of")
    assert checks.describe(checks.locate(s)).startswith("first difference: layer 1, o_proj: ")


def test_c10_fails_with_a_prefix_cache_that_survived_an_update(subject, monkeypatch):
    s = subject()
    monkeypatch.setattr(s.engine.llm, "reset_prefix_cache", lambda: True)
    assert run("C10", s).fault == "batch 2, sampled by version 1"


# ---------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Tiny models with a tokenizer, as --model wants them, of 2,048 and more positions."""
    made = {}

    def of(arch, dtype="bfloat16"):
        import base

        if (arch, dtype) not in made:
            path = made[arch, dtype] = tmp_path_factory.mktemp("checked") / arch
            shutil.copytree(tiny(arch, dtype), path)
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
            base.make_tokenizer().save_pretrained(path)
        return str(made[arch, dtype])

    return of


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "base"])
def test_kernels_py_passes_on_every_architecture(folder, base_model, tmp_path, capfd, arch):
    path = str(base_model) if arch == "base" else folder(arch)
    assert checks.main(["--model", path, "--threads", "1", "--tokens", "1500", "--json", str(tmp_path / "out.json")]) == 0
    printed, result = capfd.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert result["exact"] and result["first_difference"] is None
    assert [c["check"].split()[0] for c in result["checks"]] == [f"C{i}" for i in range(11)]
    assert all(c["exact"] and c["values"] and c["largest"] == 0 for c in result["checks"])
    assert printed.count(" yes ") == 11 and printed.rstrip().endswith("all exact")


def test_kernels_py_with_standard_kernels_runs_all_checks_and_names_an_operation(folder, tmp_path, capfd):
    args = ["--model", folder("qwen2"), "--threads", "1", "--tokens", "500", "--kernels", "standard", "--json", str(tmp_path / "out.json")]
    assert checks.main(args) == 1
    printed, result = capfd.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert len(result["checks"]) == 11
    exact = {c["check"].split()[0]: c["exact"] for c in result["checks"]}
    assert exact["C0"] and exact["C1"] and exact["C2"] and not exact["C9"] and not exact["C10"]
    assert "first difference: layer 0, " in printed and result["first_difference"]["op"] in LABELS


def test_kernels_py_ends_at_the_first_mismatch_with_the_operation(folder, capfd, monkeypatch):
    right = kernels.Rotary
    monkeypatch.setattr(kernels, "Rotary", type("Rotary", (), {"apply": staticmethod(lambda *args: first(flip)(right.apply(*args)))}))
    assert checks.main(["--model", folder("llama"), "--threads", "1", "--only", "C4", "C5", "C9"]) == 1
    printed = capfd.readouterr().out
    assert "C4 norm" in printed and "C5 elementwise" in printed and "C9" not in printed
    assert "C5: " in printed and "the first: rotary: 1 rows from row 0" in printed and "first difference: layer 0, rotary" in printed


def test_kernels_py_says_in_one_line_which_operation_of_gpt2_has_no_aligned_version(tmp_path, capfd):
    from transformers import GPT2Config

    import base

    GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, bos_token_id=1, eos_token_id=1).save_pretrained(tmp_path)
    base.make_tokenizer().save_pretrained(tmp_path)
    assert checks.main(["--model", str(tmp_path)]) == 2
    printed = capfd.readouterr().err.strip()
    assert "\n" not in printed and "LayerNorm has no aligned version" in printed and "RMSNorm, q/k RMSNorm, rotary" in printed


@pytest.mark.parametrize(
    "args, text",
    [
        (["--model", "./nothing"], "no such folder"),
        (["--model", "base", "--tokens", "0"], "--tokens 0"),
        (["--model", "base", "--threads", "-1"], "--threads -1: must be at least 0"),
        (["--model", "base", "--engine-device", "cuda:9"], "--engine-device cuda:9"),
        (["--model", "base", "--json", "./no/such/folder/out.json"], "out.json"),
        ({"model_type": "nonesuch"}, "nonesuch"),
        ({"max_position_embeddings": 512}, "has 512 positions, the checks need 513"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(base_model, capfd, tmp_path, args, text):
    if isinstance(args, dict):
        shutil.copytree(base_model, tmp_path / "model")
        config = json.loads((base_model / "config.json").read_text())
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | args))
        args = ["--model", str(tmp_path / "model")]
    assert checks.main([*args, "--only", "C0"]) == 2
    printed = capfd.readouterr().err.strip()
    assert text in printed and "\n" not in printed


# ---------------------------------------------------------------------------------------------------------------------
# How many tokens were compared


def test_200_000_sampled_tokens_have_equal_logprobs(folder):
    from rollout import Engine

    total = 0
    for arch in ARCHITECTURES:
        for dtype in ("bfloat16", "float32"):
            path = folder(arch, dtype)
            engine = Engine(path, dtype, "aligned", max_model_len=2048, max_seqs=checks.SEQS, stop_ids={0})
            tally = run("C9", checks.Subject(Learner(path, dtype), engine, tokens=25000))
            assert tally.fault is None and tally.largest == 0
            total += tally.values
    print(f"{total:,} tokens compared (contexts to 2,048, batches of 1 to 64, both dtypes, 1 and 2 threads): none different")
    assert total >= 200000


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct; $SMOLLM2 names a folder that has it already."""
    if os.environ.get("SMOLLM2"):
        return os.environ["SMOLLM2"]
    if not TOOL.exists():
        pytest.skip("the tool that makes SmolLM2 is not there")
    packages, path = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("smollm2")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), "gguf", "accelerate"]
    subprocess.run(pip, check=True)
    subprocess.run([sys.executable, str(TOOL), str(path)], check=True, env=os.environ | {"PYTHONPATH": str(packages)})
    return str(path)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_py_passes_on_smollm2(smollm2, tmp_path, dtype, capfd):
    assert checks.main(["--model", smollm2, "--dtype", dtype, "--json", str(tmp_path / "out.json")]) == 0
    values = {c["check"].split()[0]: c["values"] for c in json.loads((tmp_path / "out.json").read_text())["checks"]}
    assert values["C9"] >= 5000
    print(capfd.readouterr().out)
