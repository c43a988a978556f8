"""Which weights sample which batch, and how the rollout thread ends. A scripted engine stands in where timings and faults
are the subject; what the engine samples is tested on the real one."""

import math
import queue
import random
import threading
import time

import pytest
import torch

from rollout import Request, RolloutThread, Sample, WeightStore, sample_seed

NEVER = bool  # bool() is False: nobody interrupts


class ScriptedEngine:
    """Stands in for rollout.Engine: a token is a function of (request's seed, weights), time passes as `pause(call)` says.

    `began` gets (batch or "eval", version) as each call of generate begins.
    """

    def __init__(self, pause=lambda call: None):
        self.version, self.cancelled, self.pause, self.weights = None, False, pause, None
        self.began: queue.Queue = queue.Queue()
        self.calls: list[tuple] = []

    def load(self, weights, version):
        self.weights, self.version = weights, version

    def generate(self, requests, max_new_tokens, temperature, version):
        assert version == self.version
        call = (requests[0].prompt_ids[0], version)
        self.calls.append(call)
        self.began.put(call)
        self.pause(call)
        if self.cancelled:
            raise RuntimeError("generation cancelled")
        w = int(self.weights["w"])
        return [Sample(r.prompt_ids, [(r.seed + w) % 1000], torch.zeros(1), version, "stop", [1]) for r in requests]


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(17 * version)}


def start(engine, store, *, lag, steps, schedule="fixed", first=0, timeout=30.0, on_error=lambda: None, evaluation=None) -> RolloutThread:
    def make_requests(b):
        return [Request([b], sample_seed(0, b, 0, j)) for j in range(2)]

    thread = RolloutThread(
        engine, store, make_requests, lambda b, samples: ["text"] * len(samples), start=first, steps=steps, lag=lag,
        schedule=schedule, max_new_tokens=1, temperature=1.0, timeout=timeout, threads=1, on_error=on_error,
    )  # fmt: skip
    if evaluation:
        thread.evaluate(*evaluation)
    thread.start()
    return thread


def train(thread, store, *, lag, steps, first=0, pause=lambda k: None, after=lambda k: None) -> list:
    """The main loop of run_async.py with `pause(k)` in place of the update; returns the batches."""
    batches = []
    for k in range(first, steps):
        batches.append(thread.next(NEVER))
        pause(k)
        store.publish(k + 1, weights_of(k + 1))
        store.drop_before(max(0, k + 1 - lag))
        after(k)
    return batches


def published(*versions) -> WeightStore:
    store = WeightStore()
    for v in versions:
        store.publish(v, weights_of(v))
    return store


def until(condition, seconds=5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(condition())


@pytest.fixture
def blocked():
    """An event to block the scripted engine on; set at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


# ---------------------------------------------------------------------------------------------------------------------
# Schedules


@pytest.mark.parametrize("slow", ["rollout", "learner", "either"])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_fixed_schedule_samples_batch_b_by_version_max_0_b_minus_lag_whatever_the_timing(lag, slow):
    steps, rng = 14, random.Random(f"{lag}/{slow}")
    pauses = {side: [rng.random() * (0.012 if slow in (side, "either") else 0.001) for _ in range(steps)] for side in ("rollout", "learner")}
    engine, store = ScriptedEngine(lambda call: time.sleep(pauses["rollout"][call[0]])), published(0)
    ahead = []
    engine_generate = engine.generate

    def generate(requests, *rest):
        ahead.append(requests[0].prompt_ids[0] - store.versions()[-1])  # batch b against the updates done
        return engine_generate(requests, *rest)

    engine.generate = generate
    thread = start(engine, store, lag=lag, steps=steps)
    batches = train(thread, store, lag=lag, steps=steps, pause=lambda k: time.sleep(pauses["learner"][k]))
    assert thread.close()
    assert [b.index for b in batches] == list(range(steps))
    assert [[s.version for s in b.samples] for b in batches] == [[max(0, b - lag)] * 2 for b in range(steps)]
    assert max(ahead) <= lag


def test_rollout_runs_lag_batches_ahead_and_then_waits():
    engine, store = ScriptedEngine(), published(0)
    thread = start(engine, store, lag=3, steps=20)
    assert until(lambda: len(engine.calls) == 4)  # the batch of update 0 and three more
    time.sleep(0.25)
    assert [b for b, _ in engine.calls] == [0, 1, 2, 3]
    thread.next(NEVER)
    time.sleep(0.15)
    assert len(engine.calls) == 4  # a batch taken is not an update done
    store.publish(1, weights_of(1))
    assert until(lambda: len(engine.calls) == 5)
    assert engine.calls[-1] == (4, 1)
    assert thread.close()


def test_fixed_schedule_goes_on_from_a_checkpoints_versions():
    store = published(3, 4, 5)
    thread = start(ScriptedEngine(), store, lag=2, first=5, steps=9)
    batches = train(thread, store, lag=2, first=5, steps=9)
    assert [(b.index, b.samples[0].version) for b in batches] == [(5, 3), (6, 4), (7, 5), (8, 6)]
    assert thread.close()


def test_bound_schedule_takes_the_newest_version_there_is_and_waits_for_none_before_b_minus_lag():
    turn = threading.Semaphore(0)
    engine, store = ScriptedEngine(lambda call: turn.acquire(timeout=5)), published(0)
    thread = start(engine, store, lag=3, steps=20, schedule="bound")

    def begins():
        return engine.began.get(timeout=5)

    assert begins() == (0, 0)
    for v in (1, 2):  # the learner gets on while batch 0 is sampled
        store.publish(v, weights_of(v))
    turn.release()
    assert begins() == (1, 2)
    for b in (2, 3, 4, 5):
        turn.release()
        if b < 5:
            thread.next(NEVER)  # the queue is bounded, too
        assert begins() == (b, 2)
    turn.release()
    with pytest.raises(queue.Empty):  # batch 6 may not be sampled by version 2
        engine.began.get(timeout=0.3)
    store.publish(3, weights_of(3))
    assert begins() == (6, 3)
    turn.release(), turn.release()
    assert thread.close()


@pytest.mark.parametrize("lag", [0, 2])
def test_bound_schedule_keeps_lag_within_the_bound(lag):
    rng = random.Random(lag)
    engine, store = ScriptedEngine(lambda call: time.sleep(rng.random() * 0.006)), published(0)
    thread = start(engine, store, lag=lag, steps=20, schedule="bound")
    batches = train(thread, store, lag=lag, steps=20, pause=lambda k: time.sleep(rng.random() * 0.006))
    assert thread.close()
    for b in batches:
        assert 0 <= b.index - b.samples[0].version <= lag


# ---------------------------------------------------------------------------------------------------------------------
# Faults and endings


@pytest.mark.parametrize("where", ["generate", "load", "grade"])
def test_an_exception_in_the_thread_is_raised_by_next_and_reported_within_a_second(where):
    engine, store, reported, failed = ScriptedEngine(), published(0), threading.Event(), []

    def fail(*_):
        failed.append(time.monotonic())
        raise ZeroDivisionError("scripted")

    if where == "generate":
        engine.pause = lambda call: fail() if call[0] == 2 else None
    elif where == "load":
        engine.load = fail
    thread = RolloutThread(
        engine, store, lambda b: [Request([b], b)], fail if where == "grade" else lambda b, samples: [""], start=0, steps=9,
        lag=5, schedule="fixed", max_new_tokens=1, temperature=1.0, timeout=30.0, threads=1, on_error=reported.set,
    )  # fmt: skip
    thread.start()
    with pytest.raises(ZeroDivisionError, match="scripted"):
        for _ in range(9):
            thread.next(NEVER)
    assert time.monotonic() - failed[0] < 1
    assert reported.wait(1)
    assert thread.close()


def test_a_hang_ends_next_within_a_second_of_the_limit_with_an_error_that_names_the_flag(blocked):
    began, reported = [], threading.Event()

    def hang(call):
        began.append(time.monotonic())
        blocked.wait(20)

    thread = start(ScriptedEngine(hang), published(0), lag=0, steps=3, timeout=0.4, on_error=reported.set)
    with pytest.raises(TimeoutError, match="--rollout-timeout"):
        thread.next(NEVER)
    assert 0.4 < time.monotonic() - began[0] < 1.4
    assert reported.is_set()
    assert not thread.close(wait=0.1)  # it is still in the engine, and says so


def test_waiting_for_the_learner_is_no_hang():
    store = published(0)
    thread = start(ScriptedEngine(), store, lag=0, steps=3, timeout=0.3)
    batches = train(thread, store, lag=0, steps=3, pause=lambda k: time.sleep(0.7))
    assert [b.index for b in batches] == [0, 1, 2]
    assert thread.error is None
    assert thread.close()


def test_a_hang_of_an_evaluation_is_a_hang(blocked):
    evaluation = weights_of(0), 0, [Request(["eval"], 0)], 1, 1.0, lambda samples, version: None
    engine = ScriptedEngine(lambda call: call[0] == "eval" and blocked.wait(20))
    thread = start(engine, published(0), lag=0, steps=3, timeout=0.3, evaluation=evaluation)
    with pytest.raises(TimeoutError):
        thread.next(NEVER)
    assert engine.calls == [("eval", 0)]


@pytest.mark.parametrize("state", ["waiting for weights", "generating", "finished"])
def test_close_returns_and_ends_the_thread(state):
    engine = ScriptedEngine()
    if state == "generating":
        engine.pause = lambda call: until(lambda: engine.cancelled)
    errors = []
    thread = start(engine, published(0), lag=1, steps=2 if state == "finished" else 9, on_error=lambda: errors.append(thread.error))
    assert until(lambda: len(engine.calls) == (1 if state == "generating" else 2))
    began = time.monotonic()
    assert thread.close()
    assert time.monotonic() - began < 1
    assert not thread.is_alive() and not errors and thread.error is None


def test_next_returns_none_when_interrupted():
    thread = start(ScriptedEngine(), WeightStore(), lag=0, steps=3)
    asked = []
    assert thread.next(lambda: asked.append(1) or len(asked) > 2) is None
    assert thread.close()


# ---------------------------------------------------------------------------------------------------------------------
# Evaluations, seeds, the store


def test_evaluations_use_their_own_version_and_leave_training_batches_as_they_are():
    def run(evaluated):
        engine, store, results = ScriptedEngine(), published(0), {}
        thread = start(engine, store, lag=2, steps=12)

        def after(k):
            if evaluated and k % 3 == 2:
                requests = [Request(["eval"], sample_seed(0, "eval", 0, 0))]
                thread.evaluate(store.get(k + 1), k + 1, requests, 1, 1.0, lambda samples, version: results.update({version: samples}))

        batches = train(thread, store, lag=2, steps=12, after=after, pause=lambda k: time.sleep(0.004))
        assert until(lambda: not thread.evaluations)  # those of the last updates, too
        assert thread.close()
        return [[(s.version, s.response_ids) for s in b.samples] for b in batches], results

    plain, none = run(False)
    batches, results = run(True)
    assert batches == plain and not none
    assert sorted(results) == [3, 6, 9, 12]
    for version, samples in results.items():
        assert samples[0].version == version
        assert samples[0].response_ids == [(sample_seed(0, "eval", 0, 0) + 17 * version) % 1000]


def test_sample_seeds_are_the_same_in_every_process_and_differ_for_every_sample():
    # a value from another process: were it hash(), it would change with PYTHONHASHSEED
    assert sample_seed(0, 1, 2, 3) == 39396721232292046
    seeds = {sample_seed(s, b, i, j) for s in range(2) for b in range(12) for i in range(12) for j in range(12)}
    assert len(seeds) == 2 * 12**3
    assert sample_seed(1, 23, 4, 5) != sample_seed(12, 3, 4, 5)
    assert all(0 <= seed < 2**56 for seed in seeds)


def test_store_hands_tensors_over_and_forgets_dropped_versions():
    store, weights = WeightStore(), weights_of(3)
    store.publish(3, weights)
    store.publish(4, weights_of(4))
    assert store.get(3) is weights  # no copy
    store.drop_before(4)
    assert store.versions() == [4]
    with pytest.raises(KeyError):
        store.get(3)


def test_store_waits_for_a_version_until_it_is_published_or_the_run_stops():
    store, stop = published(0), threading.Event()
    threading.Timer(0.1, lambda: store.publish(1, weights_of(1))).start()
    version, weights = store.wait(1, newest=False, stop=stop)
    assert version == 1 and weights is store.get(1)
    assert store.wait(0, newest=False, stop=stop)[0] == 0
    assert store.wait(0, newest=True, stop=stop)[0] == 1
    threading.Timer(0.1, stop.set).start()
    began = time.monotonic()
    assert store.wait(2, newest=False, stop=stop) is None
    assert time.monotonic() - began < 1


# ---------------------------------------------------------------------------------------------------------------------
# The real engine


def requests_for(n: int, length: int = 7) -> list[Request]:
    rng = random.Random("rollout")
    return [Request([rng.randrange(1, 128) for _ in range(length)], sample_seed(0, 0, i, 0)) for i in range(n)]


def same(a: list[Sample], b: list[Sample]) -> bool:
    return all(x.response_ids == y.response_ids and torch.equal(x.logprobs, y.logprobs) for x, y in zip(a, b, strict=True))


@pytest.fixture
def qwen3(engine, tiny):
    return engine(tiny("qwen3", "bfloat16"), "bfloat16")


def test_a_response_does_not_depend_on_the_others_of_its_batch_bit_for_bit(qwen3):
    together = qwen3.generate(requests_for(9), 20, 1.0, 0)
    alone = [qwen3.generate([r], 20, 1.0, 0)[0] for r in requests_for(9)]
    backwards = qwen3.generate(requests_for(9)[::-1], 20, 1.0, 0)[::-1]
    assert same(together, alone) and same(together, backwards)
    assert len({tuple(s.response_ids) for s in together}) > 1


def test_samples_say_what_was_sampled_by_which_version_and_why_it_ended(qwen3):
    requests = requests_for(40)
    samples = qwen3.generate(requests, 30, 1.0, 0)
    for request, s in zip(requests, samples):
        assert s.prompt_ids == request.prompt_ids and s.version == 0
        assert len(s.response_ids) == len(s.logprobs) == len(s.mask) == sum(s.mask) and s.logprobs.dtype == torch.float32
        assert s.finish == ("stop" if s.response_ids[-1] == 0 else "length")  # the stop id is a sampled token like any other
        assert 0 not in s.response_ids[:-1]
        assert s.finish == "stop" or len(s.response_ids) == 30


def test_a_batch_for_another_version_than_the_engine_holds_is_refused(qwen3):
    with pytest.raises(RuntimeError, match="version 0, batch needs 1"):
        qwen3.generate(requests_for(1), 4, 1.0, 1)


def test_a_response_that_another_version_touched_is_an_error(qwen3):
    step, steps = qwen3.engine.step, []

    def step_and_relabel():
        steps.append(1)
        if len(steps) == 3:
            qwen3.engine.set_weight_version("1")
        return step()

    qwen3.engine.step = step_and_relabel
    try:
        with pytest.raises(RuntimeError, match="sampled by weights versions"):
            qwen3.generate(requests_for(1), 20, 1.0, 0)
    finally:
        del qwen3.engine.step


def test_loading_other_weights_changes_the_samples_and_loading_the_old_ones_brings_them_back(qwen3, tiny):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny("qwen3", "bfloat16"), dtype=torch.bfloat16)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    other = {name: w + 0.25 * torch.ones_like(w) * (w.ndim == 2) * torch.randn(w.shape, generator=torch.Generator().manual_seed(0)).to(w.dtype)
             for name, w in weights.items()}  # fmt: skip
    requests = requests_for(8, length=300)  # more than two blocks, so the prefix cache is in play
    first = qwen3.generate(requests, 12, 1.0, 0)
    qwen3.load(other, 1)
    changed = qwen3.generate(requests, 12, 1.0, 1)
    qwen3.load(weights, 2)
    again = qwen3.generate(requests, 12, 1.0, 2)
    assert same(first, again) and not same(first, changed)
    assert {s.version for s in again} == {2}


def test_an_engine_that_is_dropped_leaves_the_others_working(tiny, engine):
    import gc

    from rollout import Engine

    kept = engine(tiny("llama", "float32"), "float32")
    Engine(tiny("llama", "float32"), "float32", "aligned", max_model_len=256, max_seqs=4, stop_ids={0})
    gc.collect()
    (sample,) = kept.generate([Request([5, 6, 7], 1)], 4, 1.0, 0)
    assert len(sample.response_ids) >= 1


def test_a_standard_engine_samples_with_the_new_tied_head_after_a_load(tiny, engine):
    from transformers import AutoModelForCausalLM

    standard = engine(tiny("qwen3", "bfloat16"), "bfloat16", "standard")  # tied
    model = AutoModelForCausalLM.from_pretrained(tiny("qwen3", "bfloat16"), dtype=torch.bfloat16)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    embedding = weights["model.embed_tokens.weight"]
    embedding[:] = embedding[5].clone()  # every token has the same row, so every logit is the same, whatever the body does
    standard.load(weights, 1)
    (sample,) = standard.generate([Request([5, 6, 7], 1)], 3, 1.0, 1)
    assert torch.allclose(sample.logprobs, torch.full_like(sample.logprobs, -math.log(len(embedding))))
