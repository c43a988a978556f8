"""Tool use: responses of several turns. What the tool wrote is never trained on, ids are never re-tokenised, and aligned
kernels stay exact from turn to turn."""

import json
import pathlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import base
import envs
import run_async
import sandbox
from envs import load_env
from learn import Gates, Learner, advantages, batch_metrics, token_weights
from rollout import Engine, Request, sample_seed

STOPS = list(range(24))  # of 128 ids: turns are short


@pytest.fixture
def stopping(tiny, engine):
    """An engine whose turns end early, and its learner."""
    model = tiny("qwen3", "bfloat16")
    made = engine(model, "bfloat16")
    stop_ids, made.stop_ids = made.stop_ids, STOPS
    yield made, Learner(model, "bfloat16")
    made.stop_ids = stop_ids


def tool(turn_ids, turn, turns=3):
    """Three turns; what the tool writes depends on the turn's ids."""
    return None if turn + 1 == turns else [50 + turn_ids[0] % 50, 77, 50 + len(turn_ids)]


def requests(n, length=100, follow_up=tool):
    return [Request([(7 * i + j) % 128 for j in range(length + i)], sample_seed(0, i), follow_up) for i in range(n)]


def spans(mask):
    """[(value, start, end)] of the runs of equal values."""
    edges = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    return [(mask[a], a, b) for a, b in zip(edges, edges[1:])]


def test_turns_are_exact_to_the_learner(stopping):
    made, learner = stopping
    samples = made.generate(requests(24), 64, 1.0, 0)
    assert sum(0 in s.mask for s in samples) > 16
    logp, _ = learner.score(samples)
    mask = torch.tensor([m for s in samples for m in s.mask], dtype=torch.bool)
    recorded = torch.cat([s.logprobs for s in samples])
    assert torch.equal(logp.detach()[mask], recorded[mask])
    assert not recorded[~mask].any()
    for s in samples:
        assert len(s.response_ids) == len(s.mask) == len(s.logprobs)
        parts = spans(s.mask)
        assert [value for value, _, _ in parts] == [1, 0, 1, 0, 1][: len(parts)]
        for (_, a, b), (_, c, d) in zip(parts[::2], parts[1::2]):  # a turn, and what the tool wrote after it
            assert s.response_ids[b - 1] in STOPS and s.response_ids[c:d] == tool(s.response_ids[a:b], 0)


def test_a_cache_hit_and_a_miss_sample_the_same(stopping):
    made, _ = stopping
    cached, step = [], made.engine.step

    def counting_step():
        outputs = step()
        cached.extend(o.num_cached_tokens for o in outputs if o.finished)
        return outputs

    made.engine.step = counting_step
    try:
        hits = made.generate(requests(6, length=140), 200, 1.0, 0)  # longer than a block of 128
    finally:
        made.engine.step = step
    assert sum(n >= 128 for n in cached) >= 6  # the later turns
    for i, s in enumerate(hits):
        a, b = spans(s.mask)[2][1:]
        assert made.llm.reset_prefix_cache()
        request = Request(s.prompt_ids + s.response_ids[:a], sample_seed(sample_seed(0, i), 1))
        (miss,) = made.generate([request], 200, 1.0, 0)
        assert miss.response_ids == s.response_ids[a:b] and torch.equal(miss.logprobs, s.logprobs[a:b])


def test_other_sequences_do_not_wait_for_a_tool_nor_change(stopping):
    made, _ = stopping
    released, during = threading.Event(), []

    def slow(turn_ids, turn):
        if turn == 0:
            during.append(threading.current_thread().name)
            assert released.wait(20)
        return tool(turn_ids, turn)

    step = made.engine.step

    def step_and_release():
        outputs = step()
        if len(during) >= 4 and not made.engine.has_unfinished_requests():
            released.set()  # all that can go on has ended
        return outputs

    quick = made.generate(requests(8), 64, 1.0, 0)
    made.engine.step = step_and_release
    try:
        late = made.generate([*requests(4, follow_up=slow), *requests(8)[4:]], 64, 1.0, 0)
    finally:
        made.engine.step = step
    assert len(set(during)) == 4 and all(name.startswith("tool") for name in during)  # in parallel
    for a, b in zip(quick, late):
        assert a.response_ids == b.response_ids and torch.equal(a.logprobs, b.logprobs)


def test_ids_are_concatenated_not_retokenised(stopping):
    from tokenizers import Tokenizer, models

    core = Tokenizer(models.BPE({"a": 60, "b": 61, "ab": 62, "?": 63}, merges=[("a", "b")], unk_token="?"))
    pieces = [60, 61]  # not what its text is encoded to
    assert core.encode("ab").ids == [62]
    assert "".join(core.id_to_token(i) for i in pieces) == "".join(core.id_to_token(i) for i in [62])
    made, learner = stopping
    for ids in (pieces, [62]):
        samples = made.generate(requests(4, follow_up=lambda turn_ids, turn: ids if turn == 0 else None), 64, 1.0, 0)
        two = [s for s in samples if 0 in s.mask]
        assert two
        for s in two:
            _, a, b = spans(s.mask)[1]
            assert s.response_ids[a:b] == ids
        mask = torch.tensor([m for s in samples for m in s.mask], dtype=torch.bool)
        assert torch.equal(learner.score(samples)[0].detach()[mask], torch.cat([s.logprobs for s in samples])[mask])


def test_limits(stopping):
    made, _ = stopping
    endless = lambda turn_ids, turn: [99] * 5  # noqa: E731
    for s in made.generate(requests(8, follow_up=endless), 40, 1.0, 0):  # of sampled tokens; the tool's do not count
        assert sum(s.mask) == 40 and s.finish == "length" and s.mask[-1] == 1
    for s in made.generate(requests(2, length=900, follow_up=endless), 1000, 1.0, 0):  # the context
        assert 1024 - 6 <= len(s.prompt_ids + s.response_ids) <= 1024 and s.finish == "length"
    more, calls = iter([[], [], [99], [], None]), []
    (s,) = made.generate([Request([1, 2, 3], 0, lambda turn_ids, n: calls.append(n) or next(more))], 200, 1.0, 0)
    assert [n for n, _, _ in spans(s.mask)] == [1, 0, 1] and sum(i in STOPS for i in s.response_ids) == 5  # nothing to add: it goes on
    assert calls == [0, 0, 0, 1, 1]  # and does not count as a call of the tool
    for s in made.generate(requests(2, follow_up=lambda turn_ids, n: [99] * 2000), 64, 1.0, 0):  # longer than the context
        assert s.finish == "length" and 0 not in s.mask and s.response_ids[-1] in STOPS


def test_an_exception_in_a_tool_is_not_swallowed(stopping):
    made, _ = stopping

    def broken(turn_ids, turn):
        raise OSError("the tool is gone")

    with pytest.raises(OSError, match="the tool is gone"):
        made.generate(requests(2, follow_up=broken), 64, 1.0, 0)
    for output in iter(made.engine.has_unfinished_requests, False):
        made.engine.step()


def test_a_cancelled_generation_starts_no_more_programs(stopping):
    made, _ = stopping
    started = []

    def slow(turn_ids, turn):
        started.append(turn)
        made.cancelled = True
        time.sleep(0.5)

    try:
        with pytest.raises(RuntimeError, match="cancelled"):
            made.generate(requests(48, follow_up=slow), 64, 1.0, 0)
    finally:
        made.cancelled = False
    assert 0 < len(started) <= 8
    for output in iter(made.engine.has_unfinished_requests, False):
        made.engine.step()


def test_tool_tokens_are_not_trained_on(stopping):
    """No gradient, no ratio, not counted in T_i, no metric."""
    made, learner = stopping
    samples = made.generate(requests(8), 64, 1.0, 0)
    for i, s in enumerate(samples):
        s.group, s.reward = i // 4, float(i % 4 == 0)
    logp, _ = learner.score(samples)
    mask = torch.tensor([m for s in samples for m in s.mask], dtype=torch.bool)
    owner = torch.repeat_interleave(torch.arange(8), torch.tensor([len(s.mask) for s in samples]))
    logmu = torch.cat([s.logprobs for s in samples])
    logmu[~mask] = 1e30  # must not be looked at
    w, valid, rejected = token_weights(logp.detach(), logmu, mask, owner, Gates("token"))
    assert not w[~mask].any() and not valid[~mask].any() and not rejected[~mask].any()
    assert batch_metrics(samples, 0)["tokens"] == int(mask.sum())
    assert batch_metrics(samples, 0)["tool_calls"] == sum(len(spans(s.mask)) // 2 for s in samples) / 8

    # The update's gradient is that of the loss written out over sampled tokens alone.
    loss = 0.0
    for i, (s, a) in enumerate(zip(samples, advantages(samples))):
        sampled = [t for t in range(len(s.mask)) if s.mask[t]]
        mine = logp[owner == i]
        loss = loss - a / 8 / len(sampled) * sum(mine[t] for t in sampled)  # ratios are 1
    loss.backward()
    expected = torch.cat([p.grad.float().flatten() for p in learner.params.values()])
    learner.model.zero_grad()
    learner.max_grad_norm, weights = 0, learner.weights()
    metrics = learner.update(samples, 0, weights_of=lambda v: weights)
    assert metrics["nonfinite"] == 0 and metrics["mismatch_max"] == 0 and metrics["ratio_max"] == 1
    # the same sums in another order, each rounded to bfloat16 on its way
    assert (learner.master.grad - expected).norm() < 0.01 * expected.norm()


def test_stop_strings_end_a_turn(base_model):
    """The base model's worked sum, a running total a turn: the tool writes nothing, or the letter x."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base_model)
    made = Engine(str(base_model), "bfloat16", "aligned", 1024, 8, {tokenizer.eos_token_id}, stop=(" ",))
    learner = Learner(str(base_model), "bfloat16")
    made.load(learner.weights(), 0)
    prompt, x = tokenizer.encode("3+8+5+9="), tokenizer.encode("x")
    seen = []

    def follow_up(turn_ids, turn):
        seen.append(tokenizer.decode(turn_ids))
        return None if turn_ids[-1] == tokenizer.eos_token_id else x if turn == 0 else []

    samples = made.generate([Request(prompt, 5, follow_up), Request(prompt, 5)], 48, 1.0, 0)
    assert all(text.endswith(" ") and text.count(" ") == 1 for text in seen if not text.endswith("<eos>")) and len(seen) > 1
    assert samples[0].mask.count(0) == 1 and 0 not in samples[1].mask and samples[0].finish == samples[1].finish == "stop"
    assert samples[1].response_ids[: len(tokenizer.encode(seen[0]))] == tokenizer.encode(seen[0])
    mask = torch.tensor([m for s in samples for m in s.mask], dtype=torch.bool)
    assert torch.equal(learner.score(samples)[0].detach()[mask], torch.cat([s.logprobs for s in samples])[mask])


# ---------------------------------------------------------------------------------------------------------------------
# calc: the tool is Python in the sandbox


@pytest.fixture(scope="module")
def calc():
    return load_env("calc", base.make_tokenizer())


def turn(task, text, number=0):
    """What the task goes on with after a turn: text, or None."""
    ids = task.follow_up(task.tokenizer.encode(text), number)
    return ids if ids is None else task.tokenizer.decode(ids)


def test_calc_runs_the_block(calc):
    (problem,) = calc.train(0, 1)
    a, b = problem.prompt.rstrip("=").split("+")
    assert int(problem.answer) == int(a) + int(b) and len(a) == len(b) == 3
    call = f"```python\nprint({a}+{b})\n```\n"
    assert turn(calc, call) == f"```output\n{problem.answer}\n```\n"
    assert calc.reward(problem, call + f"\\boxed{{{problem.answer}}}<eos>") == 1
    assert calc.reward(problem, call + f"\\boxed{{{int(problem.answer) + 1}}}<eos>") == 0


@pytest.mark.parametrize(
    "text, expected",
    [
        ("\\boxed{12}<eos>", None),  # an answer
        ("so it is<eos>", None),
        ("```python\nprint(1)\n```<eos>", "```output\n1\n```\n"),  # end of sequence instead of a newline
        ("```python\nprint(1)\n```\n```python\nprint(2)\n```\n", "```output\n2\n```\n"),  # the last block
        ("```python\nprint(1)\n```\n\\boxed{3}<eos>", None),  # answered after it
        ("```\nprint(1)\n```\n", ""),  # no Python: sample on
        ("so it is<pad>", None),  # another end-of-sequence token than the tokenizer's
        ("```python\nprint(1)\n```<pad>", "```output\n1\n```\n"),
        ("```python\nx=1\n```\n", "```output\n\n```\n"),
    ],
)
def test_which_turns_run_something(calc, text, expected):
    assert turn(calc, text) == expected


def test_an_error_is_output_too(calc):
    assert "division by zero\n```\n" in turn(calc, "```python\nprint(1/0)\n```\n")


def test_the_last_turn_runs_nothing(calc):
    call = "```python\nprint(1)\n```\n"
    assert turn(calc, call, calc.max_turns - 2) and turn(calc, call, calc.max_turns - 1) is None


def test_a_special_token_that_a_program_prints_is_text(calc):
    ids = calc.follow_up(calc.tokenizer.encode("```python\nprint('<e'+'os>')\n```\n"), 0)
    assert calc.tokenizer.eos_token_id not in ids and calc.tokenizer.decode(ids) == "```output\n<eos>\n```\n"


def test_a_chat_template_gets_the_output_as_the_next_message(calc, monkeypatch):
    tokenizer = base.make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}({{ m['role'] }}: {{ m['content'] }}<eos>\n{% endfor %}{% if add_generation_prompt %}(assistant: {% endif %}"
    )
    monkeypatch.setattr(calc, "tokenizer", tokenizer)
    call, rest = "```python\nprint(1)\n```", "\n(user: ```output\n1\n```\n<eos>\n(assistant: "
    assert turn(calc, call + "\n") == "<eos>" + rest  # the template's end of a message is missing, so it is added
    assert turn(calc, call + "<eos>") == rest
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}, {"role": "assistant", "content": call},
                                          {"role": "user", "content": "```output\n1\n```\n"}], add_generation_prompt=True, tokenize=False).endswith(call + "<eos>" + rest)  # fmt: skip


def test_the_end_of_a_message_is_there_once_whichever_token_it_is(calc, monkeypatch):
    tokenizer = base.make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<pad>\n{% endfor %}"  # while its eos is <eos>
    monkeypatch.setattr(calc, "tokenizer", tokenizer)
    call, rest = "```python\nprint(1)\n```", "\n```output\n1\n```\n<pad>\n"
    assert turn(calc, call + "<pad>") == rest and turn(calc, call + "\n") == turn(calc, call + "<eos>") == "<pad>" + rest


def test_threads_do_not_change_each_others_encoding(calc, monkeypatch):
    """A program's output is encoded without special tokens, and a template, with them, at the same time."""
    from envs import chat_ids

    tokenizer = base.make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    monkeypatch.setattr(calc, "tokenizer", tokenizer)
    jobs = [lambda: calc.tool_ids("<eos>" * 20, ""), lambda: chat_ids(tokenizer, "so")] * 4
    alone, found = [job() for job in jobs], []
    threads = [threading.Thread(target=lambda j=j, a=a: found.extend(j() == a for _ in range(300))) for j, a in zip(jobs, alone)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == [True] * 2400


def test_without_bubblewrap_the_task_refuses_to_start(monkeypatch):
    monkeypatch.setitem(sandbox.ENV, "PATH", "/nowhere")
    with pytest.raises(ValueError, match="bubblewrap.*--unsafe-sandbox"):
        load_env("calc", base.make_tokenizer())


@pytest.mark.soak
def test_the_base_model_learns_to_call_the_tool(tmp_path):
    """From below 0.4 to above 0.7 in ten minutes, exactly."""
    command = [sys.executable, "run_async.py", "--env", "calc", "--max-new-tokens", "64", "--steps", "80", "--out", tmp_path / "run"]
    subprocess.run(command, check=True, cwd=pathlib.Path(run_async.__file__).parent)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[:8]) / 8 < 0.4 and sum(rewards[-8:]) / 8 > 0.7
    assert all(row["mismatch_max"] == 0 for row in rows) and rows[-1]["wall"] < 600


def test_python_is_a_data_set_with_the_tool(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"problem": f"How much is {i} squared?", "answer": str(i * i)}) + "\n" for i in range(40)))
    tokenizer = base.make_tokenizer()
    task, plain = (load_env(name, tokenizer, data=str(file)) for name in ("python", "jsonl"))
    (problem,) = task.train(0, 1)
    assert plain.train(0, 1)[0].answer and task.stop and not plain.stop and plain.follow_up is None
    assert "python" in tokenizer.decode(task.prompt_ids(problem)) and "python" not in tokenizer.decode(plain.prompt_ids(problem))
    call = f"```python\nprint({problem.prompt.split()[3]}**2)\n```\n"
    assert turn(task, call) == f"```output\n{problem.answer}\n```\n"
    assert task.reward(problem, call + f"\\boxed{{{problem.answer}}}") == 1


def test_a_program_that_several_responses_hold_runs_once(monkeypatch):
    calc, ran = load_env("calc", base.make_tokenizer()), []

    def slow(code, unsafe):
        ran.append(code)
        time.sleep(0.2)
        return code

    monkeypatch.setattr(envs, "run_python", slow)
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(calc.run_once, ["print(1)", "print(2)"] * 8))
    assert sorted(ran) == ["print(1)", "print(2)"] and outputs == ["print(1)", "print(2)"] * 8

    def broken(code, unsafe):
        raise OSError("no sandbox")

    monkeypatch.setattr(envs, "run_python", broken)
    with pytest.raises(OSError, match="no sandbox"):
        calc.run_once("print(3)")
