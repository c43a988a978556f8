"""The learner over 2, 3 and 4 processes against the one of learn.py: the same bits."""

import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_learn import make_samples, set_logprobs

from learn import Gates, Learner
from rollout import Weights

CASES = {  # name -> (architecture, dtype, kernels, settings); microbatches of 64 tokens: three with a gradient, one without
    "dense": ("qwen2", "bfloat16", "aligned", {"max_grad_norm": 0.05}),
    "tied": ("qwen3", "float32", "aligned", {"gradient_checkpointing": True}),
    "experts": ("qwen3-moe", "bfloat16", "aligned", {}),
    "standard": ("qwen3", "bfloat16", "standard", {"gradient_checkpointing": True, "gates": Gates("seq", 1e-4)}),
}
RUNS = {4: ["dense", "experts"], 3: ["tied"], 2: ["dense", "standard"]}  # number of learners -> cases
EVERY = [(case, learners) for learners, cases in RUNS.items() for case in cases]


def course(learner, everywhere, steps, versions):
    """Metrics of updates at lag 1. versions: {version: weights} so far; everywhere: hands rank 0's weights to all ranks."""
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


def rank_main(rank, ports, folder, paths):
    """One process, for each number of learners a rank: two updates, and the second again from the state of learn.Learner."""
    import torch.distributed as dist

    from learn_fsdp import ShardedLearner

    torch.set_num_threads(1)

    def everywhere(weights):
        box = [weights]
        dist.broadcast_object_list(box)
        return Weights(box[0])

    for (learners, cases), port in zip(RUNS.items(), ports):
        if rank >= learners:
            break
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=learners)
        for case in cases:
            (_, *how), out = CASES[case], folder / f"{case}-{learners}"
            learner, versions = make(ShardedLearner, paths[case], *how), {}
            metrics = course(learner, everywhere, [0], versions)
            if state := learner.state():
                save_file(state, f"{out}.state")
            metrics += course(learner, everywhere, [1], versions)
            learner.model.save_pretrained(out)
            weights, end = learner.weights(), learner.state()
            learner.load_state(load_file(folder / f"{case}-1.state"))
            again = course(learner, everywhere, [1], versions), learner.state()
            torch.save((metrics, learner.master.numel(), weights, end, again), f"{out}.{rank}")
        if learners == 2:
            with pytest.raises(ValueError, match="checkpoint holds 7 parameters, the model [0-9,]+; check --model"):
                learner.load_state({"master": torch.zeros(7)})
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory):
    """(case, learners) -> what each rank left, or of 1 (learner, versions, metrics, weights, state); and the folder."""
    folder, done = tmp_path_factory.mktemp("fsdp"), {}
    paths = {case: tiny(arch, dtype) for case, (arch, dtype, *_) in CASES.items()}
    torch.set_num_threads(1)
    for case, (_, *how) in CASES.items():
        learner, versions = make(Learner, paths[case], *how), {}
        metrics = course(learner, lambda weights: weights, [0], versions)
        save_file(learner.state(), folder / f"{case}-1.state")
        metrics += course(learner, lambda weights: weights, [1], versions)
        learner.model.save_pretrained(folder / f"{case}-1")
        end = {name: t.clone() for name, t in learner.state().items()}
        done[case, 1] = learner, versions, metrics, learner.weights(), end
    torch.multiprocessing.spawn(rank_main, ([free_port() for _ in RUNS], folder, paths), max(RUNS))
    for case, learners in EVERY:
        done[case, learners] = [torch.load(folder / f"{case}-{learners}.{r}", weights_only=False) for r in range(learners)]
    return done, folder


def assert_equal(got: dict, expected: dict):
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        assert got[name].dtype == t.dtype and torch.equal(got[name], t), name


@pytest.mark.parametrize("case, learners", EVERY)
def test_several_learners_have_the_bits_of_one(results, case, learners):
    done, folder = results
    _, _, metrics, weights, end = done[case, 1]
    assert metrics[1]["stepped"] and metrics[1]["lag_kl"] > 0 and metrics[0]["grad_norm"] > 0
    assert metrics[1]["mismatch_max"] == 0 if case != "standard" else metrics[1]["rejected"] > 0
    for rank, (got, _, got_weights, got_end, _) in enumerate(done[case, learners]):
        assert got == metrics
        assert_equal(got_weights, {} if rank else weights)
        assert_equal(got_end, {} if rank else end)
    for file in ("config.json", "model.safetensors"):
        assert (folder / f"{case}-{learners}" / file).read_bytes() == (folder / f"{case}-1" / file).read_bytes()


@pytest.mark.parametrize("case, learners", EVERY)
def test_a_run_goes_on_with_another_number_of_learners_and_back(results, case, learners):
    done, folder = results
    one, versions, metrics, _, end = done[case, 1]
    for rank, (*_, (again, again_end)) in enumerate(done[case, learners]):  # from one to several
        assert again == metrics[1:]
        assert_equal(again_end, {} if rank else end)
    one.load_state(load_file(folder / f"{case}-{learners}.state"))  # from several to one
    assert course(one, lambda weights: weights, [1], versions) == metrics[1:]
    assert_equal(one.state(), end)


@pytest.mark.parametrize("case, learners", EVERY)
def test_a_learner_holds_its_rows_and_no_more(results, case, learners):
    done, _ = results
    sizes, whole = [rank[1] for rank in done[case, learners]], sum(w.numel() for w in done[case, 1][3].values())
    assert whole <= sum(sizes) < whole + 64 * learners and not any(size % 64 for size in sizes)
    assert max(sizes) < 1.05 * whole / learners or case == "experts"  # six experts for four


def test_adam_gives_an_element_the_same_bits_wherever_it_lies_in_a_multiple_of_64():
    def adam(chosen):
        p = torch.nn.Parameter(weights[chosen].clone())
        optimizer = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.0, fused=True)
        for grad in grads:
            p.grad = grad[chosen].clone()
            optimizer.step()
        return torch.stack([p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]])

    weights, *grads = torch.randn(6, 64_000, generator=torch.Generator().manual_seed(0))
    whole = adam(slice(None))
    for start, size in ((0, 64), (5, 128), (1003, 6400), (63_936, 64)):
        part = slice(start, start + size)
        assert torch.equal(adam(part), whole[:, part])
