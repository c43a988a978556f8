"""The learner over 2 and 4 processes against the one of learn.py: the same bits."""

import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_learn import make_samples, set_logprobs

from learn import Learner
from rollout import Weights

CASES = {  # name -> (architecture, dtype, kernels, settings); microbatches of 64 tokens: three with a gradient, one without
    "dense": ("qwen2", "bfloat16", "aligned", {"max_grad_norm": 0.05}),
    "tied": ("qwen3", "float32", "aligned", {"gradient_checkpointing": True}),
    "experts": ("qwen3-moe", "bfloat16", "aligned", {}),
    "standard": ("qwen3", "bfloat16", "standard", {"gradient_checkpointing": True}),
}
RUNS = {2: list(CASES), 4: ["dense", "experts"]}  # number of learners -> cases


def course(learner, everywhere, steps, versions):
    """Updates at lag 1. versions: {version: weights} so far; everywhere: hands rank 0's weights to all. Returns the metrics."""
    metrics = []
    for k in steps:
        versions.setdefault(k, everywhere(learner.weights()))
        samples = make_samples(seed=k)
        for s in samples:
            s.version = max(0, k - 1)
        with learner.holding(versions[max(0, k - 1)]):
            set_logprobs(learner, samples, noise=0.0)
        metrics.append(learner.update(samples, k, versions.get))
    return metrics


def make(kind, path, dtype, mode, settings):
    return kind(path, dtype, mode, **{"lr": 1e-3, "audit": 4, "tokens_per_microbatch": 64, "device": "cpu"} | settings)


def rank_main(rank, learners, port, folder, cases, paths):
    """One rank: two updates from the start, and the second again from the state of one learner."""
    import torch.distributed as dist

    from learn_fsdp import ShardedLearner

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=learners)

    def everywhere(weights):
        box = [weights]
        dist.broadcast_object_list(box)
        return Weights(box[0])

    for case in cases:
        (_, *how), out = CASES[case], folder / f"{case}-{learners}"
        learner, versions = make(ShardedLearner, paths[case], *how), {}
        metrics = course(learner, everywhere, [0], versions)
        state, size = learner.state(), learner.master.numel()
        metrics += course(learner, everywhere, [1], versions)
        learner.model.save_pretrained(out)
        weights, end = learner.weights(), learner.state()
        learner.load_state(load_file(folder / f"{case}-1.state"))
        again = course(learner, everywhere, [1], versions), learner.state()
        torch.save((metrics, size, weights, end, again), folder / f"{case}-{learners}.{rank}")
        if rank == 0:
            save_file(state, folder / f"{case}-{learners}.state")
        if case == "dense":
            with pytest.raises(ValueError, match="checkpoint holds 7 parameters, the model [0-9,]+; check --model"):
                learner.load_state({"master": torch.zeros(7)})
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory):
    """results(case, learners) -> what the ranks left; of one learner: (learner, metrics, weights, end)."""
    folder, done = tmp_path_factory.mktemp("fsdp"), {}
    paths = {case: tiny(arch, dtype) for case, (arch, dtype, *_) in CASES.items()}
    torch.set_num_threads(1)
    for case, (_, *how) in CASES.items():
        learner, versions = make(Learner, paths[case], *how), {}
        metrics = course(learner, lambda w: w, [0], versions)
        save_file(learner.state(), folder / f"{case}-1.state")
        metrics += course(learner, lambda w: w, [1], versions)
        learner.model.save_pretrained(folder / f"{case}-1")
        end = {name: t.clone() for name, t in learner.state().items()}
        done[case] = learner, versions, metrics, learner.weights(), end

    def of(case, learners):
        if learners > 1 and (case, learners) not in done:
            torch.multiprocessing.spawn(rank_main, (learners, free_port(), folder, RUNS[learners], paths), learners)
            for c in RUNS[learners]:
                done[c, learners] = [torch.load(folder / f"{c}-{learners}.{r}", weights_only=False) for r in range(learners)]
        return done[case, learners] if learners > 1 else done[case]

    of.folder = folder
    return of


def assert_equal(got: dict, expected: dict):
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        assert got[name].dtype == t.dtype and torch.equal(got[name], t), name


EVERY = [(case, learners) for learners, cases in RUNS.items() for case in cases]


@pytest.mark.parametrize("case, learners", EVERY)
def test_several_learners_have_the_bits_of_one(results, case, learners):
    _, _, metrics, weights, end = results(case, 1)
    ranks = results(case, learners)
    assert metrics[1]["stepped"] and metrics[1]["lag_kl"] > 0
    assert case == "standard" or metrics[1]["mismatch_max"] == 0
    for got, *_ in ranks:
        assert got == metrics
    assert_equal(ranks[0][2], weights)
    assert_equal(ranks[0][3], end)
    assert all(not rank[2] and not rank[3] for rank in ranks[1:])
    for file in ("config.json", "model.safetensors"):
        assert (results.folder / f"{case}-{learners}" / file).read_bytes() == (results.folder / f"{case}-1" / file).read_bytes()


@pytest.mark.parametrize("case, learners", EVERY)
def test_each_learner_holds_its_share(results, case, learners):
    whole = sum(w.numel() for w in results(case, 1)[3].values())
    sizes = [rank[1] for rank in results(case, learners)]
    assert whole <= sum(sizes) < whole + 64 * learners
    assert case == "experts" or max(sizes) < 1.02 * whole / learners + 64
