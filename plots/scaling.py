"""What an update costs on more GPUs than we have, and whether the same simulation is right about the runs that we do have.

    python plots/scaling.py                              # prints every number of SCALING.md
    python plots/scaling.py --length-mean 2000 --network 25e9          # with other assumptions; --help lists them
    python plots/scaling.py --lengths runs/NAME          # response lengths of a run, or of a file with one number per line
    python plots/scaling.py --check RUN [RUN ...]        # predicted updates/s against measured; --keep: for SCALING.md

Simulated as rollout.RolloutThread and run_async.train do it: a batch is divided over the engines in fixed, contiguous
shares and is done when its slowest share is; update k takes batch k; the fixed schedule samples batch b by version
max(0, b - lag), the bound schedule by the newest. The queue of lag + 1 batches is not simulated: the schedules start no
batch that would not fit. Assumed numbers are the flags' defaults, and each flag says where its number comes from.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import figures
import reproduce

KEPT = pathlib.Path(__file__).resolve().parent / "scaling.json"  # the checked runs: their phases' percentiles, what was measured
SKIP = 5  # first updates, in which everything is called for the first time
UPDATES, GROUP = 200, 8
PUBLISHED = {"updates": 12_000, "GPUs": 16, "async": 68.55 * 3600, "sync": 164.77 * 3600}  # seconds; the post's table


@dataclasses.dataclass
class Model:
    """Sizes from the model's public config.json; untied head. mfu: learner's share of the GPU's peak, assumed."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int  # of one expert
    tensor_parallel: int  # GPUs per engine, assumed
    mfu: float
    experts: int = 1
    chosen: int = 1
    head_size: int = 128
    vocab: int = 151_936

    def __post_init__(self):
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        expert, head = 3 * self.hidden * self.intermediate, self.vocab * self.hidden
        self.expert_params = self.layers * self.experts * expert
        self.params = self.layers * attention + self.expert_params + 2 * head  # norms and biases: under 0.01%
        self.active = self.layers * (attention + self.chosen * expert) + head  # multiplied per token: not the embedding
        self.kv = 2 * 2 * self.layers * self.kv_heads * self.head_size  # bytes per token


MODELS = [
    Model("1.5B dense", 28, 1536, 12, 2, 8960, tensor_parallel=1, mfu=0.35),  # DeepSeek-R1-Distill-Qwen-1.5B
    Model("30B-A3B", 48, 2048, 32, 4, 768, tensor_parallel=2, mfu=0.2, experts=128, chosen=8),  # Qwen3-30B-A3B
]


def simulate(share, learn, sync, lag, schedule="fixed", barrier=True, skip=None) -> dict[str, float]:
    """share: [updates, engines] seconds that each engine takes for its share of each batch; learn, sync: [updates] seconds of
    the update and of loading a version. barrier: no engine starts a batch before all have done the last, as the rollout
    thread has it. Rates are of the updates after `skip` (by default half)."""
    updates, engines = share.shape
    skip = updates // 2 if skip is None else skip
    free, held, version, done = np.zeros(engines), -1, np.zeros(updates, int), np.zeros(updates)  # done: update b published
    busy, waited = np.zeros(updates), np.zeros(updates)
    for b in range(updates):
        start = np.maximum(free.max() if barrier else free, done[b - lag - 1] if b > lag else 0.0)
        start = np.broadcast_to(start, engines)
        version[b] = max(0, b - lag) if schedule == "fixed" else np.searchsorted(done[:b], start.min(), side="right")
        load = sync[b] if version[b] != held else 0.0
        held, free = version[b], start + load + share[b]
        before = done[b - 1] if b else 0.0
        busy[b], waited[b] = share[b].sum() + engines * load, max(0.0, free.max() - before)
        done[b] = before + waited[b] + learn[b]
    seconds = done[-1] - done[skip]
    return {"updates_per_s": (updates - 1 - skip) / seconds, "engines_idle": 1 - busy[skip + 1 :].sum() / engines / seconds,
            "learner_idle": waited[skip + 1 :].sum() / seconds, "lag": float((np.arange(updates) - version)[skip + 1 :].mean())}  # fmt: skip


def draw_lengths(args, size, rng):
    """Response lengths in tokens: of a run or file, drawn again; by default lognormal with the given mean and 99th percentile."""
    if args.lengths and (pathlib.Path(args.lengths) / "samples.jsonl").exists():  # characters there, scaled to the mean of tokens
        run = pathlib.Path(args.lengths)
        characters = np.array([len(text) for text in figures.read(run / "samples.jsonl")["response"]], float)
        measured = characters * np.mean(figures.read(run / "metrics.jsonl")["response_len"]) / characters.mean()
    elif args.lengths:
        measured = np.loadtxt(args.lengths)
    else:
        sigma = 2.3263 - np.sqrt(2.3263**2 - 2 * np.log(args.length_p99 / args.length_mean))
        return np.minimum(rng.lognormal(np.log(args.length_mean) - sigma**2 / 2, sigma, size), args.length_cap)
    return rng.choice(measured, size)


def decode_seconds(lengths, m: Model, args):
    """lengths: [..., n] tokens of n sequences that one engine decodes at once -> [...] seconds. A step reads the weights, of the
    experts those that some sequence chose, and the KV cache; sequences leave as they end. Prefill is not counted."""
    ends = np.sort(lengths, axis=-1)
    steps = np.diff(ends, axis=-1, prepend=0.0)
    flying = np.arange(ends.shape[-1], 0, -1)
    read = 2 * (m.params - m.expert_params) + 2 * m.expert_params * (1 - (1 - m.chosen / m.experts) ** flying)
    read = read + flying * (args.prompt + ends - steps / 2) * m.kv
    compute = 2 * m.active * flying / (m.tensor_parallel * args.flops * m.mfu)
    return (steps * (np.maximum(read / (m.tensor_parallel * args.hbm * args.hbm_share), compute) + args.step_overhead)).sum(-1)


def learn_seconds(lengths, m: Model, learners: int, args):
    """lengths: [updates, responses] -> [updates] seconds. Forward, recomputed forward and backward are 4 forwards; FSDP gathers
    the weights twice per microbatch and exchanges the gradient once, in bfloat16 (learn_fsdp.py), while it computes."""
    tokens = (lengths + args.prompt).sum(-1)
    attended = ((lengths + args.prompt) ** 2).sum(-1) / tokens
    compute = tokens * 4 * (2 * m.active + 2 * m.layers * m.heads * m.head_size * attended) / (learners * args.flops * m.mfu)
    microbatches = np.ceil(tokens / learners / args.tokens_per_microbatch)
    return np.maximum(compute, microbatches * 6 * m.params / (args.nvlink if learners <= 8 else args.network))


def plan(m: Model, gpus: int, learners: int, args) -> dict:
    """Phases and memory of a run on so many GPUs, `learners` of them for the learner."""
    rng = np.random.default_rng(0)
    engines, batch = (gpus - learners) // m.tensor_parallel, args.responses * gpus
    prompts = -(-batch // GROUP // engines)  # of the largest share; what is not there has length 0
    lengths = draw_lengths(args, (UPDATES, batch), rng)
    shares = np.pad(lengths, ((0, 0), (0, engines * prompts * GROUP - batch))).reshape(UPDATES, engines, -1)
    state, layer = 18 * m.params / learners, 2 * m.params / m.layers  # bfloat16 + float32 master, gradient and two of Adam
    work = args.tokens_per_microbatch * m.layers * 2 * m.hidden * 2 + 4 * m.vocab * m.hidden + 2 * layer
    return {"m": m, "gpus": gpus, "learners": learners, "batch": batch, "tokens": (lengths + args.prompt).sum(-1).mean(),
            "share": decode_seconds(shares, m, args), "learn": learn_seconds(lengths, m, learners, args),
            "sync": np.full(UPDATES, 2 * 2 * m.params / args.network), "state": state, "work": work, "fits": state + work < 0.95 * args.memory,
            "even": decode_seconds(np.full(batch // engines, lengths.mean()), m, args),
            "kv": shares.shape[-1] * (args.prompt + lengths.mean()) * m.kv, "room": m.tensor_parallel * args.memory * 0.9 - 2 * m.params}  # fmt: skip


def at(p: dict, lag: int, **other) -> dict[str, float]:
    found = simulate(p["share"], p["learn"], p["sync"], lag, **other)
    return found | {"s": 1 / found["updates_per_s"]}


def best(m: Model, gpus: int, args) -> dict:
    """The split of the GPUs with the shortest update at lag 8, of those that fit."""
    plans = [plan(m, gpus, learners, args) for learners in (gpus // 4, gpus // 2, gpus * 3 // 4)]
    if not any(p["fits"] for p in plans):
        raise SystemExit(f"--memory {args.memory:g}: {m.name} fits no split of {gpus} GPUs")
    return min((p for p in plans if p["fits"]), key=lambda p: at(p, 8)["s"])


def table(head: str, rows) -> None:
    print(f"\n| {head} |\n|{'---|' * (head.count('|') + 1)}")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def tables(args) -> None:
    for name, (value, text) in FLAGS.items():
        value = getattr(args, name.replace("-", "_"))
        print(f"- {name} {value / 1e9 if value > 1e6 else value:,g}{' G' if value > 1e6 else ''}: {text}")
    for m in MODELS:
        print(f"- {m.name}: {m.params / 1e9:.2f}e9 parameters, {m.active / 1e9:.2f}e9 multiplied per token, {m.kv:,} bytes of KV cache per token")
        print(f"  learner at {m.mfu:g} of the peak FLOP/s, {m.tensor_parallel} GPUs per engine (assumed)")
    time_rows, byte_rows = [], []
    for p in (best(m, gpus, args) for m in MODELS for gpus in (16, 64, 1024)):
        m, version, lags = p["m"], 2 * p["m"].params / 1e9, (2, 8, 64)
        fixed, free, bound = at(p, 8), at(p, 8, barrier=False), at(p, 64, schedule="bound")
        rollout, learn = p["share"].max(1).mean(), p["learn"].mean()
        first = "learner" if learn > rollout else "longest response" if rollout > 2 * p["even"] else "decoding"
        name = [m.name, f"{p['gpus']:,} = {p['gpus'] - p['learners']} + {p['learners']}"]
        time_rows.append([*name, f"{p['tokens'] / 1e6:.1f}M", f"{rollout:.1f} ({p['even']:.1f})", f"{learn:.1f}", f"{p['sync'][0]:.2f}",
                          " / ".join(f"{at(p, lag)['s']:.1f}" for lag in (0, *lags)), f"{free['s']:.1f}",
                          f"{fixed['engines_idle']:.0%} / {fixed['learner_idle']:.0%}", f"{bound['lag']:.1f}", first])  # fmt: skip
        byte_rows.append([*name, f"{version:.1f}", f"{version * (p['gpus'] - p['learners']):,.0f}",
                          " / ".join(f"{(lag + 1) * version:,.0f}" for lag in lags),
                          " / ".join(f"{(lag + 1) * version / p['learners']:,.1f}" for lag in lags),
                          f"{p['state'] / 1e9:.1f} + {p['work'] / 1e9:.1f}", f"{p['kv'] / 1e9:.0f} of {p['room'] / 1e9:.0f}"])  # fmt: skip
    table("model | GPUs = engines' + learner's | tokens | rollout, s (all of mean length) | learner, s | weights, s | s per update, lag 0 / 2 / 8 / 64 "
          "| lag 8, engines that do not wait | idle at lag 8, engines / learner | mean lag, bound 64 | first limit", time_rows)  # fmt: skip
    table("model | GPUs | version, GB | sent per version, GB | versions, lag 2 / 8 / 64, GB | the same per learner GPU "
          "| learner GPU, state + work, GB | engine, KV cache, GB", byte_rows)  # fmt: skip
    print()
    for m in MODELS:
        for p in (plan(m, 16, learners, args) for learners in (4, 8, 12)):
            if not p["fits"]:
                print(f"- {m.name} does not fit {p['learners']} learner GPUs: {p['state'] / 1e9:.0f} + {p['work'] / 1e9:.0f} GB each")
        small = best(m, 64, argparse.Namespace(**{**vars(args), "tokens_per_microbatch": 8192}))
        print(f"- {m.name} on 64 GPUs with --tokens-per-microbatch 8,192: learner {small['learn'].mean():.1f} s")
    published(best(MODELS[0], 16, args), args)


def published(p: dict, args) -> None:
    """What the published hours allow and exclude."""
    m, (a, s) = p["m"], (PUBLISHED[k] / PUBLISHED["updates"] for k in ("async", "sync"))
    step = decode_seconds(np.ones(1), m, args)
    scale, target = 1.0, None
    for _ in range(20):  # lengths at which this page's model takes the published time
        scaled = {k: v * scale for k, v in vars(args).items() if k.startswith("length_")}
        target = plan(m, 16, p["learners"], other := argparse.Namespace(**{**vars(args), **scaled}))
        scale *= a / at(target, 8)["s"]
    print(f"- published: {a:.1f} s per update asynchronous, {s:.1f} s synchronous, {s / a:.2f} times; {16 * a:.0f} GPU seconds per update")
    print(f"- overlapping two phases gives at most 2, so {s - 2 * a:.1f} s of a synchronous update were something else")
    print(f"- a sequence alone takes {step * 1e3:.1f} ms per token: {a / step:,.0f} tokens in {a:.1f} s, {s / step:,.0f} in {s:.1f} s")
    print(f"- weights: {p['sync'][0]:.2f} s = {p['sync'][0] / a:.1%} of {a:.1f} s; {PUBLISHED['updates']:,} updates in 68.55 h and 164.77 h on 16 GPUs")
    print(f"- {a:.1f} s here: mean length {other.length_mean:,.0f}, 99th percentile {other.length_p99:,.0f}; sync / async would be {at(target, 0)['s'] / at(target, 8)['s']:.2f}")


# ---------------------------------------------------------------------------------------------------------------------
# Against runs


def measure(folder: pathlib.Path) -> dict:
    """Percentiles of a run's phases, and what the simulation is to predict. folder: a run's, or one of plots/logs."""
    log = folder / "metrics.jsonl"
    m = {k: np.array(v, float) for k, v in figures.read(log if log.exists() else folder / "metrics.jsonl.gz").items()}
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
    seconds, later = m["wall"][-1] - m["wall"][SKIP], slice(SKIP + 1, None)
    loaded = m["t_sync"][1:][np.diff(m["step"] - m["lag"]) > 0]  # there are new weights for this batch
    engine = m["t_rollout"] + m["t_sync"]
    return {"run": folder.name, "engines": config.get("engines", 1), "lag": config.get("lag", int(m["lag"].max())),
            "schedule": config.get("schedule", "fixed"), "updates": len(m["wall"]), "machine": f"{reproduce.os.cpu_count()} cores, {reproduce.cpu()}",
            **{k: np.percentile(v, range(0, 101, 5)).round(5).tolist() for k, v in (("rollout", m["t_rollout"][SKIP:]), ("learn", m["t_learn"][SKIP:]), ("sync", loaded))},
            "measured": {"updates_per_s": round((len(m["wall"]) - 1 - SKIP) / seconds, 4), "learner_idle": round(m["t_wait"][later].sum() / seconds, 4),
                         "engines_idle": round(1 - engine[later].sum() / seconds, 4), "lag": round(m["lag"][later].mean(), 4)}}  # fmt: skip


def check(runs: list[dict]) -> None:
    """Print predicted against measured. Phases are drawn from the run's percentiles, each by itself: what is predicted is how
    they fit together, not how long they are."""
    rows = []
    for run in runs:
        drawn = {k: [] for k in run["measured"]}
        for seed in range(20):
            rng = np.random.default_rng(seed)
            rollout, learn, sync = (np.interp(rng.uniform(0, 100, run["updates"]), range(0, 101, 5), run[k]) for k in ("rollout", "learn", "sync"))
            for k, v in simulate(rollout[:, None], learn, sync, run["lag"], run["schedule"], skip=SKIP).items():
                drawn[k].append(v)
        predicted, measured = {k: float(np.mean(v)) for k, v in drawn.items()}, run["measured"]
        times = ", ".join(f"{run[k][10]:.3f} ({run[k][5]:.3f} to {run[k][15]:.3f})" for k in ("rollout", "learn", "sync"))
        rows.append([f"{run['run']}, {run['updates']} updates", str(run["engines"]), f"{run['lag']} {run['schedule']}", times, f"{measured['updates_per_s']:.2f}",
                     f"{predicted['updates_per_s']:.2f}", f"{predicted['updates_per_s'] / measured['updates_per_s']:.2f}",
                     *(" / ".join(f"{round(x[k], 2) + 0.0:.0%}" for x in (measured, predicted)) for k in ("engines_idle", "learner_idle")), f"{measured['lag']:.1f} / {predicted['lag']:.1f}"])  # fmt: skip
    table("run | engines | lag | rollout, learner, weights: median s (quartiles) | updates/s | predicted | ratio | engines idle, measured / predicted "
          "| learner idle | mean lag", rows)  # fmt: skip


FLAGS = {
    "responses": (16, "responses per update and GPU; 256 on 16 GPUs, this project's default batch (assumed)"),
    "prompt": (200, "tokens of a prompt (assumed)"),
    "length-mean": (4000, "mean of the lognormal response lengths, tokens (assumed)"),
    "length-p99": (16000, "their 99th percentile, at most 15 times the mean (assumed)"),
    "length-cap": (16384, "limit of a response (assumed)"),
    "tokens-per-microbatch": (32768, "as run_async.py's (assumed; 8,192 is the default there)"),
    "flops": (989e12, "dense bfloat16 FLOP/s of a GPU (H100 SXM data sheet)"),
    "hbm": (3.35e12, "memory bandwidth, bytes/s (data sheet)"),
    "memory": (80e9, "bytes of a GPU (data sheet)"),
    "nvlink": (450e9, "bytes/s per GPU and direction within a machine of 8 (data sheet)"),
    "network": (50e9, "bytes/s per GPU between machines (400 Gb/s, assumed)"),
    "hbm-share": (0.6, "share of the memory bandwidth that decoding reaches (assumed)"),
    "step-overhead": (0.002, "seconds per decoding step that no byte explains: launches, scheduler, sampler (assumed)"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="+", type=pathlib.Path, metavar="RUN", help="run folders, or folders of plots/logs")
    parser.add_argument("--keep", action="store_true", help=f"with --check: write plots/{KEPT.name}")
    parser.add_argument("--lengths", help="run folder, or file with a response length per line")
    for name, (value, text) in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{text}; {value:g}")
    args = parser.parse_args()
    for name in FLAGS:
        if not 0 < (value := getattr(args, name.replace("-", "_"))) < float("inf"):
            parser.error(f"--{name} {value}: must be above 0")
    if not args.length_mean <= args.length_p99 < 14.9 * args.length_mean:
        parser.error(f"--length-p99 {args.length_p99}: a lognormal's is at least --length-mean and less than 15 times as much")
    if args.lengths and not pathlib.Path(args.lengths).exists():
        parser.error(f"--lengths {args.lengths}: no such run or file")
    for folder in args.check or ():
        if not any((folder / f"metrics.jsonl{end}").exists() for end in ("", ".gz")):
            parser.error(f"--check {folder}: no run there (no metrics.jsonl)")
    runs = [measure(folder) for folder in args.check] if args.check else json.loads(KEPT.read_text()) if KEPT.exists() else []
    if args.keep and args.check:
        KEPT.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
    if not args.check:
        tables(args)
    check(runs)


if __name__ == "__main__":
    main()
