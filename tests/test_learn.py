"""The learner against naive computations: loss and gradient, importance weights, gates, metrics, state."""

import dataclasses
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from learn import Gates, Learner, MismatchError, Stats, advantages, batch_metrics, token_weights
from rollout import Sample

# ---------------------------------------------------------------------------------------------------------------------
# Helpers


def make_samples(seed=0, groups=((3, 1.0, 0.0, 1.0), (17, 0.0, 0.0, 1.0), (40, 1.0, 1.0, 1.0)), responses=(1, 5, 9, 30, 2, 14, 3, 8, 21)):
    """Samples of random tokens with prompts of different lengths, made-up log-probabilities, and masks with zeros.
    groups: (prompt length, reward of each sample). The last group's rewards are equal: it has no gradient."""
    g = torch.Generator().manual_seed(seed)
    lengths, samples = iter(responses), []
    for group, (prompt, *rewards) in enumerate(groups):
        ids = torch.randint(1, 128, (prompt,), generator=g).tolist()
        for reward in rewards:
            n = next(lengths)
            mask = (torch.rand(n, generator=g) < 0.8).int().tolist()
            mask[0] = 1
            samples.append(Sample(ids, torch.randint(1, 128, (n,), generator=g).tolist(), torch.zeros(n), 0, "stop", mask, group, reward))
    return samples


@torch.no_grad()
def set_logprobs(learner, samples, noise, seed=1):
    """Record log mu_v = log pi_k + noise, as a sampler with older weights would have."""
    g = torch.Generator().manual_seed(seed)
    for s in samples:
        logp = learner.score([s])[0]
        s.logprobs = logp + noise * torch.randn(len(logp), generator=g)


def copies(samples):
    return [dataclasses.replace(s, logprobs=s.logprobs.clone(), mask=list(s.mask)) for s in samples]


def stock_logprobs(model, sample, temperature=1.0):
    """(log-probabilities, entropies) of one response from the stock transformers model, [T] each, differentiable."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logits = model(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].float() / temperature
    logp = torch.log_softmax(logits, -1)
    return logp.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def naive_gradient(path, samples, temperature=1.0, weight=lambda ratio, all_ratios: ratio):
    """DESIGN section 1 written out: {parameter: gradient} and the loss. weight(w_it, the response's w) is a gate."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    loss = 0.0
    for s in samples:
        rewards = [other.reward for other in samples if other.group == s.group]
        advantage = s.reward - sum(rewards) / len(rewards)
        logp, _ = stock_logprobs(model, s, temperature)
        ratios = torch.exp(logp.detach() - s.logprobs)
        sampled = [t for t in range(len(s.response_ids)) if s.mask[t]]
        for t in sampled:
            w = weight(ratios[t].item(), ratios[sampled])
            loss = loss - (1 / len(samples)) * (1 / len(sampled)) * w * advantage * logp[t]
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, loss.item()


def gradient(learner):
    """{parameter: gradient} that the last update left in the learner."""
    return {name: g for name, (_, _, g) in zip(learner.params, learner.views)}


def assert_close_gradients(got, expected, tolerance=1e-5):
    assert got.keys() == expected.keys()
    for name, g in expected.items():
        error = (got[name] - g).norm() / g.norm()
        assert error < tolerance, f"{name}: relative error {error:.2g}"


def new_learner(path, mode="aligned", dtype="float32", **settings):
    return Learner(path, dtype, mode, **{"max_grad_norm": 0.0, "audit": 0, "lr": 1e-3} | settings)


def update(learner, samples, step=0):
    before = learner.weights()
    return learner.update(samples, step, lambda version: before)


@pytest.fixture
def path(tiny):
    return tiny("qwen3", "float32")


# ---------------------------------------------------------------------------------------------------------------------
# Loss and gradient


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("mode", ["aligned", "standard"])
@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_gradient_and_loss_equal_the_formula_written_out_in_loops(tiny, arch, mode, temperature):
    path, samples = tiny(arch, "float32"), make_samples()
    learner = new_learner(path, mode, temperature=temperature)
    set_logprobs(learner, samples, noise=0.3)
    expected, loss = naive_gradient(path, samples, temperature)
    metrics = update(learner, samples)
    assert_close_gradients(gradient(learner), expected)
    norm = math.sqrt(sum(g.double().square().sum().item() for g in expected.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=5e-5)
    # the formula gives the third group's tokens, whose advantage is 0, no part in the loss; nor does the learner
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)


def test_response_of_one_token_has_the_gradient_of_the_formula(path):
    samples = make_samples(groups=((3, 1.0, 0.0),), responses=(1, 1))
    learner = new_learner(path)
    set_logprobs(learner, samples, noise=0.3)
    expected, _ = naive_gradient(path, samples)
    update(learner, samples)
    assert_close_gradients(gradient(learner), expected)


@pytest.mark.parametrize("mode", ["aligned", "standard"])
def test_gradient_does_not_depend_on_the_microbatch_split(path, mode):
    samples, results = make_samples(), {}
    for tokens in (1, 64, 10_000):
        learner = new_learner(path, mode, tokens_per_microbatch=tokens)
        if tokens == 1:
            set_logprobs(learner, samples, noise=0.3)
        metrics = update(learner, samples)
        results[tokens] = gradient(learner), metrics
    for tokens in (1, 64):
        assert_close_gradients(results[tokens][0], results[10_000][0])
        for key, value in results[10_000][1].items():
            assert results[tokens][1][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_microbatches_hold_every_sample_once_in_order_within_the_token_limit(path):
    samples = make_samples()
    for limit in (1, 64, 100, 10_000):
        cut = new_learner(path, tokens_per_microbatch=limit).microbatches(samples)
        assert [i for part in cut for i in part] == list(range(len(samples)))
        for part in cut:
            tokens = sum(len(samples[i].prompt_ids) + len(samples[i].response_ids) for i in part)
            assert tokens <= limit or len(part) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_changes_no_bit_of_the_gradient(tiny, dtype):
    samples, grads = make_samples(), []
    for checkpointing in (False, True):
        learner = new_learner(tiny("qwen3", dtype), dtype=dtype, gradient_checkpointing=checkpointing)
        if not checkpointing:
            set_logprobs(learner, samples, noise=0.3)
        update(learner, samples)
        grads.append(learner.master.grad.clone())
    assert grads[0].abs().max() > 0
    assert torch.equal(*grads)


def test_standard_gradient_checkpointing_gives_the_same_gradient(path):
    samples, grads = make_samples(), []
    for checkpointing in (False, True):
        learner = new_learner(path, "standard", gradient_checkpointing=checkpointing)
        if not checkpointing:
            set_logprobs(learner, samples, noise=0.3)
        update(learner, samples)
        grads.append(gradient(learner))
    assert_close_gradients(*grads)


def test_same_update_twice_gives_the_same_bits(tiny):
    samples, weights = make_samples(), []
    for _ in range(2):
        learner = new_learner(tiny("qwen2", "bfloat16"), dtype="bfloat16")
        set_logprobs(learner, samples, noise=0.3)
        update(learner, samples)
        weights.append(learner.master.detach().clone())
    assert torch.equal(*weights)


def test_gradient_norm_is_summed_without_losing_float32_digits(path):
    # one float32 norm over a whole model's gradient is 29% off at 2^28 equal numbers, and 1e-5 off already at this size
    samples = make_samples()
    learner = new_learner(path)
    set_logprobs(learner, samples, noise=0.3)
    assert update(learner, samples)["grad_norm"] == pytest.approx(learner.master.grad.double().norm().item(), rel=2e-6)


def test_gradient_norm_is_clipped_and_logged_before_clipping(path):
    samples = make_samples()
    learner = new_learner(path, max_grad_norm=0.01)
    set_logprobs(learner, samples, noise=0.3)
    metrics = update(learner, samples)
    assert metrics["grad_norm"] > 0.01
    assert learner.master.grad.norm().item() == pytest.approx(0.01, rel=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# What the importance weights make exact, with policies small enough to enumerate


def policies(seed, shape):
    """(theta, mu): logits of pi that want a gradient, probabilities of a behaviour policy; softmax over the last axis."""
    g = torch.Generator().manual_seed(seed)
    theta = torch.randn(shape, generator=g, dtype=torch.float64)
    mu = torch.softmax(theta + 0.8 * torch.randn(shape, generator=g, dtype=torch.float64), -1)
    return theta.requires_grad_(), mu


def weights_of(logp, mu, gates=Gates()):
    """token_weights for tokens that are all sampled, each a response of its own."""
    n = len(logp)
    return token_weights(logp.detach(), mu.log(), torch.ones(n, dtype=torch.bool), torch.arange(n), gates)[0]


REWARD = torch.tensor([1.0, 0.0, 0.3, 0.7, 0.0], dtype=torch.float64)


def bandit_gradient(theta, mu, gates=Gates(), baseline=0.4):
    """E over a ~ mu of w (R - baseline) grad log pi(a), by enumeration."""
    logp = torch.log_softmax(theta, -1)
    (g,) = torch.autograd.grad((mu * weights_of(logp, mu, gates) * (REWARD - baseline) * logp).sum(), theta)
    return g


def test_expected_lagged_gradient_of_one_token_responses_is_the_on_policy_gradient():
    theta, mu = policies(0, 5)
    (on_policy,) = torch.autograd.grad((torch.softmax(theta, -1) * REWARD).sum(), theta)
    torch.testing.assert_close(bandit_gradient(theta, mu), on_policy, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("gates", [Gates(ratio_cap=1.0), Gates("token", low=0.8, high=1.2), Gates("seq", threshold=0.01)])
def test_a_gate_or_a_cap_biases_the_expected_gradient(gates):
    theta, mu = policies(0, 5)
    (on_policy,) = torch.autograd.grad((torch.softmax(theta, -1) * REWARD).sum(), theta)
    assert (bandit_gradient(theta, mu, gates) - on_policy).norm() > 0.1 * on_policy.norm()


def test_the_group_mean_keeps_the_lagged_gradient_exact_up_to_the_factor_of_the_group_size():
    # the mean holds the sample's own reward, which scales the expectation by (G - 1) / G and does not turn it; G = 2
    theta, mu = policies(1, 5)
    logp = torch.log_softmax(theta, -1)
    w, total = weights_of(logp, mu), 0.0
    for a in range(5):
        for b in range(5):
            group = [Sample([0], [x], torch.zeros(1), 0, "stop", [1], 0, REWARD[x].item()) for x in (a, b)]
            first, second = advantages(group)
            total = total + mu[a] * mu[b] * (w[a] * first * logp[a] + w[b] * second * logp[b]) / 2
    (lagged,) = torch.autograd.grad(total, theta)
    (on_policy,) = torch.autograd.grad((torch.softmax(theta, -1) * REWARD).sum(), theta)
    torch.testing.assert_close(lagged, on_policy / 2, rtol=1e-12, atol=1e-15)


class ThreeTokens:
    """Responses of three tokens from a vocabulary of three with a table of logits for each prefix; all 27 enumerated."""

    def __init__(self, lagged: bool):
        (t1, m1), (t2, m2), (t3, m3) = policies(2, 3), policies(3, (3, 3)), policies(4, (3, 3, 3))
        self.theta = [t1, t2, t3]
        pi = [torch.softmax(t, -1) for t in self.theta]
        mu = [m1, m2, m3] if lagged else [p.detach() for p in pi]
        # each [3, 3, 3], indexed by the whole response
        self.pi, self.mu = ([p[0][:, None, None].expand(3, 3, 3), p[1][:, :, None].expand(3, 3, 3), p[2]] for p in (pi, mu))
        self.reward = torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def expected(self):
        """E over responses ~ mu of sum_t w_t R grad log pi(a_t), with the product's own weights."""
        total = 0.0
        for pi, mu in zip(self.pi, self.mu):
            logp = pi.log()
            w = weights_of(logp.flatten(), mu.flatten()).view(3, 3, 3)
            total = total + (self.mu[0] * self.mu[1] * self.mu[2] * w * self.reward * logp).sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(total, self.theta, retain_graph=True)])

    def on_policy(self):
        value = (self.pi[0] * self.pi[1] * self.pi[2] * self.reward).sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, self.theta, retain_graph=True)])

    def one_step_surrogate(self):
        """Gradient of sum_t E[R], where token t is drawn from pi, the tokens before and after it from mu."""
        value = 0.0
        for t in range(3):
            drawn = [self.pi[i] if i == t else self.mu[i] for i in range(3)]
            value = value + (drawn[0] * drawn[1] * drawn[2] * self.reward).sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, self.theta, retain_graph=True)])


def test_token_ratios_give_longer_responses_the_gradient_of_the_one_step_surrogate():
    # Token-level ratios correct each token's own draw, not the prefixes' distribution nor the reward's: the expectation is
    # the gradient of the conservative-policy-iteration surrogate (Kakade & Langford 2002), not of the value itself.
    case = ThreeTokens(lagged=True)
    torch.testing.assert_close(case.expected(), case.one_step_surrogate(), rtol=1e-12, atol=1e-15)
    assert (case.expected() - case.on_policy()).norm() > 0.05 * case.on_policy().norm()


def test_at_lag_zero_the_expected_gradient_of_longer_responses_is_the_on_policy_gradient():
    case = ThreeTokens(lagged=False)
    torch.testing.assert_close(case.expected(), case.on_policy(), rtol=1e-12, atol=1e-15)


# ---------------------------------------------------------------------------------------------------------------------
# Advantages


def test_advantage_is_the_reward_minus_the_mean_of_its_own_group():
    samples = make_samples()
    assert advantages(samples) == pytest.approx([1 / 3, -2 / 3, 1 / 3, -1 / 3, -1 / 3, 2 / 3, 0, 0, 0])
    interleaved = [samples[i] for i in (0, 3, 6, 1, 4, 7, 2, 5, 8)]
    assert advantages(interleaved) == pytest.approx([1 / 3, -1 / 3, 0, -2 / 3, -1 / 3, 0, 1 / 3, 2 / 3, 0])


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-9, -0.7, 1e16])
def test_group_of_equal_rewards_has_advantages_of_exactly_zero(reward):
    # the plain sum / n gives 0.1 * 3 / 3 != 0.1
    for n in range(2, 20):
        group = make_samples(groups=((3, *[reward] * n),), responses=[1] * n)
        assert advantages(group) == [0.0] * n


def test_batch_of_equal_rewards_takes_no_step(path):
    learner = new_learner(path)
    mixed, equal = make_samples(), make_samples(groups=((3, 0.1, 0.1, 0.1), (9, 1.0, 1.0)), responses=(4, 5, 6, 7, 8))
    set_logprobs(learner, mixed, noise=0.3)
    set_logprobs(learner, equal, noise=0.3)
    assert update(learner, mixed)["stepped"] is True  # Adam now has momentum that a step would follow
    before = learner.master.detach().clone()
    weights, state = learner.weights(), {k: v.clone() for k, v in learner.state().items()}
    metrics = update(learner, equal)
    assert metrics["stepped"] is False
    assert metrics["grad_norm"] == 0 and metrics["loss"] == 0 and metrics["groups_mixed"] == 0
    assert torch.equal(learner.master, before)
    assert all(torch.equal(w, learner.weights()[name]) for name, w in weights.items())
    assert all(torch.equal(v, learner.state()[k]) for k, v in state.items())


# ---------------------------------------------------------------------------------------------------------------------
# Non-finite numbers


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf, -200.0])  # exp(200) overflows: the ratio is infinite
def test_nonfinite_token_leaves_numerator_and_denominator_and_is_counted(path, value):
    learner, samples = new_learner(path), make_samples()
    set_logprobs(learner, samples, noise=0.3)
    masked = copies(samples)
    masked[3].mask[7] = 0
    assert samples[3].mask[7] == 1
    samples[3].logprobs[7] = value
    metrics = update(learner, samples)
    other = new_learner(path)
    expected = update(other, masked)
    assert metrics["nonfinite"] == 1 and expected["nonfinite"] == 0
    assert torch.equal(learner.master.grad, other.master.grad)
    for key in ("kl", "d3", "ess", "ratio_max", "ratio_min", "entropy", "loss"):
        assert math.isfinite(metrics[key]) and metrics[key] == expected[key], key


def test_unsampled_token_may_hold_any_logprob(path):
    learner, samples = new_learner(path), make_samples()
    set_logprobs(learner, samples, noise=0.3)
    other = copies(samples)
    for s in other:
        s.logprobs[torch.tensor(s.mask) == 0] = math.nan
    metrics = update(learner, other)
    fresh = new_learner(path)
    update(fresh, samples)
    assert metrics["nonfinite"] == 0
    assert torch.equal(learner.master.grad, fresh.master.grad)


def test_response_without_a_valid_token_gives_no_gradient_and_stays_in_the_batch_size(path):
    learner, samples = new_learner(path), make_samples(groups=((3, 1.0, 0.0),), responses=(4, 6))
    set_logprobs(learner, samples, noise=0.3)
    samples[1].logprobs.fill_(-math.inf)
    alone = copies(samples)
    metrics = update(learner, samples)
    assert metrics["nonfinite"] == sum(samples[1].mask)
    alone[1].mask = [0] * 6
    fresh = new_learner(path)
    update(fresh, alone)
    assert learner.master.grad.abs().max() > 0
    assert torch.equal(learner.master.grad, fresh.master.grad)


# ---------------------------------------------------------------------------------------------------------------------
# Gates


def gate_token(ratio, _):
    return ratio if 0.8 <= ratio <= 1.2 else 0.0


def gate_seq(ratio, ratios):
    return ratio if (ratios - 1 - ratios.log()).mean() <= 0.04 else 0.0


@pytest.mark.parametrize(
    "gates, naive",
    [
        (Gates("token", low=0.8, high=1.2), gate_token),
        (Gates("seq", threshold=0.04), gate_seq),
        (Gates(ratio_cap=1.1), lambda ratio, _: min(ratio, 1.1)),
        (Gates("token", low=0.8, high=1.2, ratio_cap=1.1), lambda ratio, _: min(gate_token(ratio, _), 1.1)),
        (Gates(importance_sampling=False), lambda ratio, _: 1.0),
    ],
    ids=["token", "seq", "ratio_cap", "token_and_cap", "no_importance_sampling"],
)
def test_gate_gives_rejected_tokens_weight_zero_and_keeps_them_in_b_and_t(path, gates, naive):
    learner, samples = new_learner(path, gates=gates), make_samples()
    set_logprobs(learner, samples, noise=0.3)
    expected, loss = naive_gradient(path, samples, weight=naive)
    ratios = [torch.exp(learner.score([s])[0].detach() - s.logprobs)[torch.tensor(s.mask) == 1] for s in samples]
    metrics = update(learner, samples)
    plain, _ = naive_gradient(path, samples)
    assert any((plain[n] - expected[n]).norm() > 0.01 * plain[n].norm() for n in plain)  # the gate does something here
    assert_close_gradients(gradient(learner), expected)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    if gates.gate == "token":
        outside = sum(((r < 0.8) | (r > 1.2)).sum().item() for r in ratios)
        share = outside / sum(len(r) for r in ratios)
    elif gates.gate == "seq":
        share = sum(gate_seq(1.0, r) == 0 for r in ratios) / len(ratios)
    else:
        share = 0.0
    assert metrics["rejected"] == pytest.approx(share)
    assert 0 < share < 1 or gates.gate == "none"
    assert metrics["ratio_max"] == pytest.approx(max(r.max().item() for r in ratios), rel=1e-4)  # before any gate


def test_gates_are_off_by_default():
    assert Gates() == Gates("none", 0.01, 0.5, 5.0, None)
    log_ratio = torch.tensor([-3.0, 0.0, 3.0, 6.0])
    weights, valid, rejected = token_weights(log_ratio, torch.zeros(4), torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64), Gates())
    assert torch.equal(weights, log_ratio.exp()) and valid.all() and not rejected.any()


def test_seq_gate_rejects_whole_responses_by_the_mean_over_their_sampled_tokens():
    owner = torch.tensor([0, 0, 0, 1, 1, 2])
    mask = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.bool)
    logp = torch.tensor([0.1, 0.0, 9.0, 0.3, 0.0, 0.0])  # the 9 is of an unsampled token
    weights, _, rejected = token_weights(logp, torch.zeros(6), mask, owner, Gates("seq"))
    # means of r - 1 - log r: 0.0026 and 0.0249 and 0, threshold 0.01
    assert rejected.tolist() == [False, False, False, True, True, False]
    assert torch.equal(weights, torch.tensor([logp[0].exp(), 1, 0, 0, 0, 1]))


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


@pytest.mark.parametrize("mode", ["aligned", "standard"])
def test_metrics_equal_their_definitions(path, mode):
    from transformers import AutoModelForCausalLM

    learner, samples = new_learner(path, mode), make_samples()
    set_logprobs(learner, samples, noise=0.3)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    log_ratio, entropy = [], []
    with torch.no_grad():
        for s in samples:
            logp, h = stock_logprobs(model, s)
            sampled = torch.tensor(s.mask) == 1
            log_ratio.append((logp - s.logprobs)[sampled])
            entropy.append(h[sampled])
    log_ratio, entropy = torch.cat(log_ratio).double(), torch.cat(entropy).double()
    w = log_ratio.exp()
    expected = {
        "kl": -log_ratio.mean(), "d3": (w - 1 - log_ratio).mean(), "ess": w.sum() ** 2 / (len(w) * w.square().sum()),
        "ratio_max": w.max(), "ratio_min": w.min(), "entropy": entropy.mean(), "rejected": 0, "nonfinite": 0,
        "tokens": len(w), "response_len": len(w) / len(samples), "reward": 5 / 9 + 1 / 9,
        "reward_std": torch.tensor([s.reward for s in samples]).std(correction=0), "groups_mixed": 2 / 3, "truncated": 0,
        "lag": 0, "lag_max": 0, "step": 0, "lr": 1e-3,
    }  # fmt: skip
    metrics = update(learner, samples)
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(float(value), rel=1e-4, abs=1e-7), key


def test_truncated_and_lag_count_the_batchs_samples():
    samples = make_samples()
    for i, s in enumerate(samples):
        s.finish, s.version = ("length" if i < 4 else "stop"), (7 if i < 3 else 10)
    metrics = batch_metrics(samples, 11)
    assert metrics["truncated"] == 4 / 9
    assert metrics["lag"] == pytest.approx((3 * 4 + 6 * 1) / 9) and metrics["lag_max"] == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "qwen3-untied", "llama"])
def test_ratios_are_exactly_one_when_the_learner_scores_its_own_logprobs_in_another_batch(tiny, arch, dtype):
    learner, samples = new_learner(tiny(arch, dtype), dtype=dtype, tokens_per_microbatch=100), make_samples()
    set_logprobs(learner, samples, noise=0.0)  # scored one by one; the update scores them together
    metrics = update(learner, samples)
    assert [metrics[k] for k in ("kl", "d3", "ratio_max", "ratio_min", "ess")] == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_empty_statistics_are_nan_or_zero_and_do_not_raise():
    stats = Stats()
    nothing = torch.zeros(2, dtype=torch.bool)
    stats.add(torch.zeros(2), torch.full((2,), math.nan), torch.ones(2), ~nothing, nothing, nothing, torch.tensor([0, 0]), torch.zeros(2))
    metrics = stats.metrics("none")
    assert metrics["nonfinite"] == 2 and metrics["kl"] == 0 and metrics["loss"] == 0 and math.isnan(metrics["ratio_max"])


# ---------------------------------------------------------------------------------------------------------------------
# The audit


def own_samples(learner, version=0):
    samples = make_samples()
    set_logprobs(learner, samples, noise=0.0)
    for s in samples:
        s.version = version
    return samples


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_audit_of_the_learners_own_logprobs_is_exactly_zero(tiny, dtype):
    learner = new_learner(tiny("qwen3", dtype), dtype=dtype, audit=9)
    metrics = update(learner, own_samples(learner))
    assert metrics["stepped"]
    assert [metrics[k] for k in ("mismatch_kl", "mismatch_max", "mismatch_exact", "lag_kl")] == [0.0, 0.0, 1.0, 0.0]


def test_one_logprob_off_by_one_ulp_stops_an_aligned_run(tiny):
    learner = new_learner(tiny("qwen3", "bfloat16"), dtype="bfloat16", audit=9)
    samples = own_samples(learner)
    samples[4].logprobs[0] = torch.nextafter(samples[4].logprobs[0], torch.tensor(0.0))
    with pytest.raises(MismatchError, match="--allow-mismatch"):
        update(learner, samples)


def test_allow_mismatch_goes_on_and_reports_it(tiny):
    learner = new_learner(tiny("qwen3", "bfloat16"), dtype="bfloat16", audit=9, allow_mismatch=True)
    samples = own_samples(learner)
    samples[4].logprobs[0] = torch.nextafter(samples[4].logprobs[0], torch.tensor(0.0))
    metrics = update(learner, samples)
    n = sum(sum(s.mask) for s in samples)
    assert 0 < metrics["mismatch_max"] < 1e-6 and metrics["mismatch_exact"] == pytest.approx((n - 1) / n)


def test_a_nan_in_an_audited_logprob_stops_an_aligned_run(path):
    learner = new_learner(path, audit=9)
    samples = own_samples(learner)
    samples[4].logprobs[0] = math.nan
    with pytest.raises(MismatchError):
        update(learner, samples)


def test_standard_kernels_report_a_mismatch_and_go_on(path):
    learner = new_learner(path, "standard", audit=9)
    samples = own_samples(learner)
    samples[4].logprobs[0] += 0.1
    assert update(learner, samples)["mismatch_max"] == pytest.approx(0.1, rel=1e-3)


def test_audit_tells_policy_lag_from_mismatch(path):
    learner = new_learner(path, audit=9)
    versions = {0: learner.weights()}
    samples = own_samples(learner)
    other = make_samples(seed=3)
    set_logprobs(learner, other, noise=0.3)
    update(new := new_learner(path), other)
    learner.load_state(new.state())  # the weights of version 1
    versions[1] = learner.weights()
    now = [learner.score([s])[0].detach() for s in samples]
    newest = copies(samples[:3])  # the first group was sampled by version 1, the others by version 0
    for s, logp in zip(newest, now):
        s.logprobs, s.version = logp, 1
    metrics = learner.update(newest + samples[3:], 1, versions.get)
    sampled = [torch.tensor(s.mask) == 1 for s in samples]
    log_r = torch.cat([(torch.zeros_like(p) if i < 3 else p - s.logprobs)[m] for i, (p, s, m) in enumerate(zip(now, samples, sampled))]).double()
    assert metrics["mismatch_max"] == 0 and metrics["lag"] == pytest.approx(6 / 9)
    assert metrics["lag_kl"] > 0
    assert metrics["lag_kl"] == pytest.approx((torch.expm1(log_r) - log_r).mean().item(), rel=1e-6)
    assert metrics["lag_kl"] == pytest.approx(metrics["d3"], rel=1e-6)  # no mismatch: all of the ratio is lag
    assert learner.update(newest, 2, versions.get)["mismatch_max"] == 0  # the audit put the learner's weights back


# ---------------------------------------------------------------------------------------------------------------------
# Weights and state


def test_bfloat16_run_accumulates_updates_smaller_than_a_bfloat16_step(tiny):
    learner, samples = new_learner(tiny("qwen3", "bfloat16"), dtype="bfloat16", lr=1e-4), make_samples()
    set_logprobs(learner, samples, noise=0.3)
    name = "model.norm.weight"
    i = list(learner.params).index(name)
    weight, master, _ = learner.views[i]
    start = weight.detach().clone()
    assert torch.equal(master, start.float())
    for k in range(3):
        update(learner, samples, k)
    assert (master != start.float()).all() and (master - start.float()).abs().max() < 4e-4
    assert torch.equal(weight, start)  # a step near 1 is 2^-8 or 2^-7: bfloat16 alone would have forgotten all three
    for k in range(3, 60):
        update(learner, samples, k)
    assert not torch.equal(weight, start)
    assert torch.equal(weight, master.to(torch.bfloat16))


def test_published_weights_do_not_change_with_later_updates(path):
    learner, samples = new_learner(path), make_samples()
    set_logprobs(learner, samples, noise=0.3)
    published = learner.weights()
    kept = {name: w.clone() for name, w in published.items()}
    update(learner, samples)
    assert all(torch.equal(published[name], w) for name, w in kept.items())
    assert any(not torch.equal(learner.weights()[name], w) for name, w in kept.items())


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("arch, dtype", [("qwen3", "bfloat16"), ("qwen3-untied", "float32")])
def test_restored_learner_goes_on_bit_for_bit(tiny, tmp_path, arch, dtype, before):
    from safetensors.torch import load_file, save_file

    learner, samples = new_learner(tiny(arch, dtype), dtype=dtype), make_samples()
    set_logprobs(learner, samples, noise=0.3)
    for k in range(before):
        update(learner, samples, k)
    save_file(learner.state(), tmp_path / "learner.safetensors")
    restored = new_learner(tiny(arch, dtype), dtype=dtype)
    restored.load_state(load_file(tmp_path / "learner.safetensors"))
    for k in range(before, before + 2):
        assert update(learner, samples, k) == update(restored, samples, k)
    assert torch.equal(learner.master, restored.master)
    assert all(torch.equal(w, restored.weights()[name]) for name, w in learner.weights().items())


def test_state_of_another_model_is_refused(tiny, path):
    with pytest.raises(ValueError, match="check --model"):
        new_learner(path).load_state(new_learner(tiny("qwen2", "float32")).state())


# ---------------------------------------------------------------------------------------------------------------------
# Memory


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any tensor made inside has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return out


def test_vocabulary_of_150000_never_makes_a_tensor_of_all_tokens_logits():
    N, V = 300, 150_000
    hidden = torch.randn(N, 16, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(V, 16, dtype=torch.bfloat16).requires_grad_()
    with LargestTensor() as largest:
        logp, _ = kernels.TokenLogprobs.apply(hidden, weight, None, torch.arange(N), 1.0)
        logp.backward(torch.ones(N))
    assert weight.grad is not None
    assert V * 16 <= largest.elements <= 2**25 < N * V


def test_chunks_cover_the_rows_in_whole_groups_within_the_limit():
    for vocab, rows in ((64, 10), (150_000, 8192), (150_000, 1), (128, 5), (5_000_000, 40)):
        chunks = kernels._chunks(vocab, rows)
        assert [a for a, _ in chunks] == [0] + [b for _, b in chunks[:-1]] and chunks[-1][1] == rows
        assert all(a % kernels.ROWS == 0 for a, _ in chunks)
        assert all((b - a) * vocab <= 2**25 or b - a <= kernels.ROWS for a, b in chunks)
