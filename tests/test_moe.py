"""Mixture of experts: a token's result is its own, both sides choose the same experts, and the engine's choice can be replayed."""

import json
import shutil

import pytest
import torch

import checks
import kernels
import kernels_moe
import rollout
from learn import Learner
from test_checks import broken, first, flip, subject  # noqa: F401 (fixtures)
from test_checks import run as run_check
from test_kernels import check_gradients, make_requests, randn
from test_run import FORKS, in_fork, run, start  # noqa: F401 (fixtures)

kernels.load_ops()
ROWS = [*range(1, 65), 127, 128, 129, 255, 256, 257, 511, 512]


def weights(E, H, I, dtype=torch.float32):
    """Of a router and its experts."""
    return [0.3 * randn(*shape, seed=i).to(dtype) for i, shape in enumerate([(E, H), (E, 2 * I, H), (E, H, I)])]


def compute(x, router, gate_up, down, k, normalise=True):
    logits = kernels.linear(x, router)
    return logits, *kernels_moe.moe(x, logits, gate_up, down, k, normalise)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("E, k, H, I", [(8, 2, 128, 256), (6, 3, 64, 96), (60, 8, 128, 128)])
def test_a_rows_result_does_not_depend_on_the_other_rows_that_are_routed_to_its_experts(dtype, E, k, H, I):
    x, w = randn(512, H, seed=9).to(dtype), weights(E, H, I, dtype)
    whole = compute(x, *w, k)
    assert len(whole[2].unique()) == E  # all experts are used
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for n in ROWS:
            for a in {0, 512 - n, (512 - n) * 3 // 7}:
                for got, expected in zip(compute(x[a : a + n].clone(), *w, k), whole):
                    assert torch.equal(got, expected[a : a + n]), (n, a, threads)


def test_a_row_that_is_routed_with_nan_in_the_batch_is_as_it_would_be_without():
    x, w = randn(40, 64), weights(6, 64, 96)
    alone = compute(x[1:], *w, 3)
    x[0] = torch.nan
    for got, expected in zip(compute(x, *w, 3), alone):
        assert torch.equal(got[1:], expected)


def test_of_equally_probable_experts_the_lower_ones_are_chosen_in_their_order():
    logits = torch.zeros(40, 8)
    logits[1::2, 5] = 1.0
    chosen, experts = kernels_moe.route(logits, 3, True)
    assert experts[0::2].unique(dim=0).tolist() == [[0, 1, 2]] and experts[1::2].unique(dim=0).tolist() == [[0, 1, 5]]
    torch.testing.assert_close(chosen.sum(-1), torch.ones(40))
    probabilities, experts = kernels_moe.route(logits, 3, False)
    assert torch.equal(probabilities, torch.softmax(logits, -1).gather(1, experts))


@pytest.mark.parametrize("normalise", [True, False])
def test_moe_backward_equals_autograd(normalise):
    E, k, H, I = 6, 3, 32, 128

    def reference(x, router, gate_up, down):
        p = torch.softmax(x @ router.t(), -1)
        weight, experts = p.topk(k, -1)
        weight = weight / weight.sum(-1, keepdim=True) if normalise else weight
        gate, up = torch.einsum("th,tkih->tki", x, gate_up[experts]).chunk(2, -1)
        return torch.einsum("tk,tki,tkhi->th", weight, torch.nn.functional.silu(gate) * up, down[experts])

    check_gradients(lambda x, *w: compute(x, *w, k, normalise)[1], reference, randn(77, H, seed=5), *weights(E, H, I))


def test_an_expert_that_nobody_chose_has_a_gradient_of_zero():
    x, (router, gate_up, down) = randn(40, 64), weights(6, 64, 96)
    logits = kernels.linear(x, router)
    logits[:, 4] = -100.0
    gate_up, down = gate_up.requires_grad_(), down.requires_grad_()
    kernels_moe.moe(x, logits, gate_up, down, 2, True)[0].sum().backward()
    used = [e for e in range(6) if e != 4]
    for grad in (gate_up.grad, down.grad):
        assert not grad[4].any() and grad[used].flatten(1).any(1).all()


def test_the_backward_gives_the_same_bits_on_every_run_on_two_threads():
    torch.set_num_threads(2)
    x, w = randn(1000, 128).to(torch.bfloat16), weights(8, 128, 256, torch.bfloat16)
    grads = []
    for _ in range(5):
        inputs = [t.clone().requires_grad_() for t in (x, *w)]
        grads.append(torch.autograd.grad(compute(*inputs, 2)[1].float().square().sum(), inputs))
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(other, grads[0]))


# ---------------------------------------------------------------------------------------------------------------------
# Both sides


def own_choice(learner, samples) -> torch.Tensor:
    """[fed tokens, layers, k], in the order of Sample.experts."""
    with torch.no_grad():
        learner.score(samples)
    return torch.stack([router.chosen[learner.fed] for router in learner.routers], 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_learner_chooses_the_experts_that_the_engine_chose_and_no_token_flips(tiny, engine, dtype):
    path = tiny("qwen3-moe", dtype)
    learner, rollout_engine = Learner(path, dtype, audit=99), engine(path, dtype)
    requests = make_requests([1, 5, 40, 127, 128, 129, 150, 300] * 2, shared=130)  # some begin in the prefix cache
    rollout_engine.generate(requests, 4, 1.0, 0)
    samples = rollout_engine.generate(requests, 30, 1.0, 0)
    assert torch.equal(torch.cat([s.experts for s in samples]).long(), own_choice(learner, samples))
    metrics = learner.update(samples, 0, lambda version: None)
    assert metrics["route_flips"] == 0 and metrics["mismatch_max"] == 0
    shares = [metrics[f"expert_{e}"] for e in range(6)]
    assert sum(shares) == pytest.approx(1) and max(shares) <= metrics["expert_max"] <= 1 / 3 + 1e-9  # 3 of a token's choices differ


def test_every_turn_of_a_response_has_its_experts(tiny, engine):
    path = tiny("qwen3-moe", "bfloat16")
    learner, rollout_engine = Learner(path, "bfloat16"), engine(path, "bfloat16")
    rollout_engine.stop_ids = list(range(64))  # many turns
    requests = make_requests([5, 100, 130])
    for request in requests:
        request.follow_up = lambda turn, number: [70, 71] if number < 3 else None
    samples = rollout_engine.generate(requests, 30, 1.0, 0)
    rollout_engine.stop_ids = [0]
    assert any(0 in s.mask for s in samples)
    assert torch.equal(torch.cat([s.experts for s in samples]).long(), own_choice(learner, samples))


def test_a_standard_engine_computes_with_packed_experts_after_a_load(tiny, engine):
    # vLLM 0.32's reload leaves them unpacked, which its kernel does not notice: log-probabilities off by whole nats
    path = tiny("qwen3-moe", "bfloat16")
    learner, rollout_engine = Learner(path, "bfloat16", "standard"), engine(path, "bfloat16", "standard")
    samples = rollout_engine.generate(make_requests([5, 17, 40] * 4), 20, 1.0, 0)
    with torch.no_grad():
        difference = (learner.score(samples)[0] - torch.cat([s.logprobs for s in samples])).abs()
    assert 0 < difference.mean() < 0.05


def test_replay_puts_the_engines_experts_into_the_stock_model(tiny, engine):
    path = tiny("qwen3-moe", "bfloat16")
    own, replay = (Learner(path, "bfloat16", "standard", routing=routing) for routing in ("own", "replay"))
    samples = engine(path, "bfloat16").generate(make_requests([5, 17, 40] * 4), 20, 1.0, 0)
    sizes = [len(s.experts) for s in samples]
    for s, experts in zip(samples, own_choice(own, samples).split(sizes)):
        s.experts = experts
    with torch.no_grad():
        expected = own.score(samples)[0]
        assert torch.equal(replay.score(samples)[0], expected)
        for s in samples:
            s.experts = (s.experts + 1) % 6
        others = replay.score(samples)[0]
    assert not torch.equal(others, expected)
    # the same of the formula: a stock model whose routers can choose nothing else
    for i, router in enumerate(own.routers):
        def force(module, args, out, i=i):
            experts = out[2].index_copy(0, own.fed, torch.cat([s.experts for s in samples])[:, i].long())
            p = torch.softmax(out[0].float(), -1).gather(1, experts)
            return out[0], (p / p.sum(-1, keepdim=True)).to(out[0].dtype), experts

        router.register_forward_hook(force)
    with torch.no_grad():
        assert torch.equal(own.score(samples)[0], others)


def test_a_flipped_expert_is_counted_once_for_its_token(tiny, engine):
    path = tiny("qwen3-moe", "bfloat16")
    learner = Learner(path, "bfloat16", audit=99)
    samples = engine(path, "bfloat16").generate(make_requests([5, 17, 40]), 20, 1.0, 0)
    total = sum(len(s.experts) for s in samples)
    samples[1].experts = samples[1].experts.clone()
    samples[1].experts[3:5, :, 0] = (samples[1].experts[3:5].sum(-1) + 1) % 6
    samples[2].experts = samples[2].experts.flip(-1)  # the same experts in another order
    flipped = (samples[1].experts.sort(-1)[0] != own_choice(learner, samples[1:2]).sort(-1)[0]).flatten(1).any(1).sum()
    assert 0 < flipped <= 2
    assert learner.update(samples, 0, lambda version: None)["route_flips"] == pytest.approx(int(flipped) / total)


# ---------------------------------------------------------------------------------------------------------------------
# The checks


@pytest.mark.parametrize("op, broken_part", [("router", "gate"), ("router's choice", "route"), ("experts", "w2"), ("combination", "mlp")])
def test_locator_names_the_part_that_is_broken_in_the_engine(subject, broken, monkeypatch, op, broken_part):  # noqa: F811
    s = subject("qwen3-moe")
    s.sync()
    s.sync = lambda: None
    mlp, route, calls = s.runner.model.model.layers[1].mlp, kernels_moe.route, []

    def other_route(logits, *args):
        calls.append(torch.is_inference_mode_enabled())  # the engine's is, the learner's is not
        return route(logits.roll(1, -1) if calls[-1] and len(calls) % 2 == 0 else logits, *args)

    if broken_part == "gate":
        broken(mlp.gate, first(flip))
    elif broken_part == "mlp":
        broken(mlp, flip)
    elif broken_part == "w2":
        mlp.experts.routed_experts.w2_weight.data[2] *= 1.5
    else:
        monkeypatch.setattr(kernels_moe, "route", other_route)  # in every second layer
    found = checks.locate(s, lengths=(3, 20))
    assert (found["op"], found["layer"]) == (op, 1)


def test_c3_fails_with_experts_that_are_wrong_at_one_number_of_rows(subject, broken):  # noqa: F811
    s = subject("qwen3-moe")
    broken(s.engine_layers[-1].mlp, flip, rows=37)
    assert "combination: 37 rows" in run_check("C3", s).fault


def test_c1_fails_with_stock_experts_that_a_sync_left_unpacked(subject, monkeypatch):  # noqa: F811
    s = subject("qwen3-moe", mode="standard")
    assert run_check("C1", s).fault is None
    monkeypatch.setattr(rollout, "_experts", lambda model: [])
    assert "mlp.experts" in run_check("C1", s).fault


# ---------------------------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random mixture of experts with the base model's tokenizer."""
    import base

    path, tokenizer = tmp_path_factory.mktemp("moe"), base.make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base.new_model(tokenizer, base.MODEL | base.EXPERTS | {"num_hidden_layers": 2}).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def rows(path) -> list[dict]:
    timed = lambda key: key.startswith("t_") or key == "wall"  # noqa: E731
    return [{k: v for k, v in json.loads(line).items() if not timed(k)} for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_the_same_whenever_it_is_repeated_and_resumes_to_the_same_bits(run, folder, tmp_path):  # noqa: F811
    args = "--model", folder, "--save-every", 2, "--steps", 4
    once = run(*args)
    assert all(m["mismatch_max"] == m["route_flips"] == 0 for m in once.rows())
    assert sum(once.rows()[-1][f"expert_{e}"] for e in range(8)) == pytest.approx(1)
    shutil.move(once.folder, tmp_path / "once")
    again = run(*args)
    assert rows(tmp_path / "once") == rows(again.folder)
    shutil.rmtree(again.folder / "checkpoint-4")
    process = FORKS.Process(target=in_fork, args=(["--resume", again.folder], tmp_path / "console", None))
    process.start()
    process.join(120)
    assert process.exitcode == 0, (tmp_path / "console").read_text()
    assert rows(tmp_path / "once") == rows(again.folder)
    for name in ("model.safetensors", "learner.safetensors", "versions.safetensors"):
        assert (tmp_path / "once" / "checkpoint-4" / name).read_bytes() == again.bytes(f"checkpoint-4/{name}")


def test_standard_kernels_replay_the_engines_experts_in_a_run(run, folder):  # noqa: F811
    for m in run("--model", folder, "--kernels", "standard", "--routing", "replay", "--steps", 2, "--lag", 0).rows():
        assert 0 < m["mismatch_max"] < 1 and 0 <= m["route_flips"] < 0.5 and m["stepped"] in (True, False)


def other(path, model_type: str, **more):
    """A tiny random model of an architecture without aligned kernels, with the base model's tokenizer."""
    import base
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = base.make_tokenizer()
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    vocabulary = dict(vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None)
    config = AutoConfig.for_model(model_type, **sizes | vocabulary | more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_another_mixture_of_experts_trains_with_standard_kernels(run, tmp_path):  # noqa: F811
    path = other(tmp_path / "model", "granitemoe", num_local_experts=4, num_experts_per_tok=2)
    for m in run("--model", path, "--kernels", "standard", "--steps", 3, "--lag", 1).rows():
        assert 0 < m["mismatch_max"] < 1 and sum(m[f"expert_{e}"] for e in range(4)) == pytest.approx(1)


@pytest.mark.parametrize("kernels", ["standard", "aligned"])
def test_a_model_that_scales_its_logits_is_refused_in_one_line(run, tmp_path, kernels):  # noqa: F811
    path = other(tmp_path / "model", "gemma2")
    console = run("--model", path, "--kernels", kernels, "--steps", 2, code=2).console
    assert "final_logit_softcapping" in console and "Traceback" not in console


@pytest.mark.parametrize("args", [["--model", "base-moe"], ["--kernels", "standard"]])
def test_replay_without_a_use_is_refused_in_one_line(run, args):  # noqa: F811
    console = run(*args, "--routing", "replay", "--steps", 2, code=2).console
    assert "--routing replay" in console and "Traceback" not in console
