"""Rollout: vLLM generates batches of responses at a given weights version, in a thread beside the learner.

    Engine         vLLM in this process: load(weights, version), generate(requests, ...) -> samples, close()
    WeightStore    the versions that the learner has published and that some batch may still need
    RolloutThread  decides which version samples which batch (--schedule), and hands finished batches to the main loop
"""

import collections
import contextlib
import hashlib
import operator
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

import kernels
import kernels_cuda


@dataclass
class Request:
    """One response to sample: the prompt's token ids and the seed of its own random stream."""

    prompt_ids: list[int]
    seed: int
    # Tool use: (token ids of the turn just sampled, how often there was something to append before) -> token ids to append and
    # sample on, or None when the response is complete. Called from another thread, while other sequences go on.
    follow_up: Callable[[list[int], int], list[int] | None] | None = None
    top_p: float = 1.0  # other than 1 for evaluation only: importance sampling needs the whole distribution


@dataclass
class Sample:
    """One sampled response. Token ids are what the engine sampled; nothing is ever re-tokenised from text."""

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: torch.Tensor  # [len(response_ids)] float32: log mu_v of each token, as recorded by the engine; 0 where mask is 0
    version: int  # the weights version that sampled every token
    finish: str  # "stop" or "length"
    mask: list[int]  # 1 for sampled tokens, 0 for tool output
    group: int = 0  # samples of one prompt share a group
    reward: float = 0.0
    reward_error: str = ""  # what the task's reward function raised; the reward is then 0
    experts: torch.Tensor | None = None  # [prompt + response - 1, layers, k] int16: whom the engine's routers chose (MoE)


@dataclass
class Batch:
    """The samples of one update, in the order (prompt, sample), and what it took to make them."""

    index: int
    samples: list[Sample]
    texts: list[str]  # decoded responses
    t_rollout: float  # seconds of sampling and grading
    t_sync: float  # seconds of loading weights


def sample_seed(*path) -> int:
    """A 56-bit seed that is a pure function of its arguments, e.g. (seed, batch, prompt, sample)."""
    digest = hashlib.blake2b("/".join(map(str, path)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def decode(tokenizer, samples: list[Sample], tools: bool = True) -> list[str]:
    """The responses' texts, with or without what tools wrote."""
    ids = [s.response_ids if tools else [t for t, m in zip(s.response_ids, s.mask) if m] for s in samples]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


# vLLM's process groups belong to the process: when one engine is garbage-collected, they go, and all others fail with
# "pipeline model parallel group is not initialized". So none is.
_ALIVE: list = []


class Engine:
    """vLLM in this process, sampling plainly: temperature (and, in evaluations, top-p) only; no top-k or penalties, nothing
    inherited from the model's generation_config.json.

    model: local Hugging Face folder; dtype: "bfloat16" or "float32"; kernels_mode: "aligned" or "standard";
    max_model_len: tokens of prompt and response together; max_seqs: sequences decoded at once; stop_ids: token ids that
    end a response; stop: strings that end a turn of a request with a follow-up; device: "cpu" or "cuda:N", and
    gpu_memory_utilization the share of its memory that vLLM takes (kernels_cuda.py says what they are by default); llm: further
    arguments of vllm.LLM, on a GPU.
    """

    def __init__(self, model, dtype, kernels_mode, max_model_len, max_seqs, stop_ids, seed=0, stop=(), device=None,
                 gpu_memory_utilization=None, **llm):
        # One process: the learner's tensors are the engine's input, and the rollout thread may share the lock of
        # kernels.py. Must be set before vLLM is imported.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        self.device = device or kernels_cuda.choose_devices()[0]
        self.stream = kernels_cuda.own_stream(self.device)  # None on CPUs
        if self.stream is None:
            settings = {
                "enforce_eager": True,
                # a seed per request and a chunk of a prompt do not go together in vLLM 0.32 on a CPU ("CPU Generator
                # does not use offset"); without chunks a prompt must fit a step
                "enable_chunked_prefill": False,
                "block_size": kernels.BLOCK,
                "kv_cache_memory_bytes": _kv_cache_bytes(model, dtype, max_model_len, max_seqs),
            }
        else:
            settings = kernels_cuda.engine_settings(kernels_mode, self.device, gpu_memory_utilization) | llm
            kernels_cuda.prepare(kernels_mode, self.device, **settings)
        from vllm import LLM

        set_num_threads = torch.set_num_threads  # vLLM's CPU worker replaces it by a warning (v1/worker/cpu_worker.py)
        self.mode, self.stop_ids, self.version, self.cancelled = kernels_mode, sorted(stop_ids), None, False
        self.max_model_len, self.stop = max_model_len, list(stop)
        self.shapes = None  # of the parameters, from the first load
        with kernels.engine_kernels(kernels_mode, self.device), torch.cuda.stream(self.stream):
            self.llm = LLM(
                model, dtype=dtype, seed=seed, max_model_len=max_model_len, max_num_seqs=max_seqs,
                max_num_batched_tokens=max(8192, max_model_len), enable_prefix_caching=True, **settings,
                skip_tokenizer_init=not stop,  # ids in, ids out; text is looked at for stop strings alone
                generation_config="vllm",  # not the model's own: a repetition penalty there would change sampling
                logprobs_mode="processed_logprobs",  # after the temperature, as sampled
            )  # fmt: skip
        torch.set_num_threads = set_num_threads
        self.engine = self.llm.llm_engine
        _ALIVE.append(self.llm)
        self.experts = {}
        if self.stream is None:
            self.llm.collective_rpc(_use_plain_sampler)
            scheduler = self.engine.engine_core.engine_core.scheduler
            _allocate_at_block_ends(scheduler.kv_cache_manager)
            (runner,) = self.llm.collective_rpc(lambda worker: worker.model_runner)
            self.experts = _record_experts(runner, scheduler)

    def load(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Copy weights (parameter name of transformers -> tensor) into the engine and label it with their version.

        Raises RuntimeError if they are not the parameters of the first load, or the prefix cache, which holds keys and values
        of the old weights, was not reset.
        """
        self.version = None  # until all of it is there
        shapes = {name: w.shape for name, w in weights.items()}
        self.shapes = self.shapes or shapes
        if shapes != self.shapes:  # vLLM leaves a parameter that is missing without a value, and says nothing
            wrong = min(dict(self.shapes.items() ^ shapes.items()))
            raise RuntimeError(f"weights version {version} cannot be loaded: {wrong} is missing or has another shape")
        with kernels.engine_kernels(self.mode, self.device), kernels_cuda.reading(weights, self.stream):
            # loading builds the linear layers' dispatch anew
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
            if self.stream is None:
                self.llm.collective_rpc(_renew_packed)
        self.loaded(version)

    def loaded(self, version: int) -> None:
        """The weights of `version` are in the engine."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache after a weight load: old keys and values would be reused")
        self.engine.set_weight_version(str(version))
        self.version = version

    def generate(self, requests: list[Request], max_new_tokens: int, temperature: float, version: int,
                 progress=lambda: None) -> list[Sample]:
        """Sample one response per request, of at most `max_new_tokens` sampled tokens, in as many turns as its follow-up
        wants; call progress() after each. Raises RuntimeError if any token came from another version than `version`."""
        if version != self.version:
            raise RuntimeError(f"engine holds weights version {self.version}, batch needs {version}")
        samples = [Sample(r.prompt_ids, [], torch.empty(0), version, "length", []) for r in requests]
        turns = [0] * len(requests)

        def go_on(i, tool_ids):
            """Append tool tokens, which are not sampled, and queue the next turn; None, or no room for a token, is the end."""
            s = samples[i]
            if tool_ids is not None:
                room = max_new_tokens - sum(s.mask)
                free = self.max_model_len - len(s.prompt_ids + s.response_ids + tool_ids)
                if turns[i] and min(room, free) < 1:  # of a prompt that is too long, vLLM says so
                    s.finish, tool_ids = "length", None
            if tool_ids is None:
                return progress()
            s.response_ids, s.mask = s.response_ids + tool_ids, s.mask + [0] * len(tool_ids)
            s.logprobs = torch.cat([s.logprobs, torch.zeros(len(tool_ids))])
            self._add(str(i), requests[i], s, turns[i], room, temperature)
            turns[i] += 1

        for i in range(len(requests)):
            go_on(i, [])
        pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="tool")  # starts no thread unless there is work
        with contextlib.ExitStack() as at_exit, torch.cuda.stream(self.stream):
            at_exit.callback(pool.shutdown, cancel_futures=True)  # if it is not the end: of 256 programs, 8 are waited for
            running = {}  # follow-up under way -> its request
            while running or self.engine.has_unfinished_requests():
                if self.cancelled:
                    raise RuntimeError("generation cancelled")
                if not self.engine.has_unfinished_requests():
                    wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
                else:
                    for output in [o for o in self.engine.step() if o.finished]:
                        i = int(output.request_id)
                        s, turn = samples[i], _append_turn(samples[i], output.outputs[0])
                        if output.request_id in self.experts:
                            s.experts = self.experts.pop(output.request_id)[: len(s.prompt_ids + s.response_ids) - 1]
                        if requests[i].follow_up and s.finish == "stop":
                            calls = sum(map(operator.gt, s.mask, s.mask[1:]))
                            running[pool.submit(requests[i].follow_up, turn, calls)] = i
                        else:
                            progress()
                for future in [f for f in running if f.done()]:
                    go_on(running.pop(future), future.result())
        if not torch.cat([s.logprobs for s in samples]).isfinite().all():
            self.llm.collective_rpc(_clear_kv_cache)
        return samples

    def _add(self, name, request, sample, turn, max_new_tokens, temperature) -> None:
        """Queue a turn of a response; its tokens so far are a prompt, most of which the prefix cache holds."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=temperature, top_p=request.top_p, max_tokens=max_new_tokens, skip_clone=True,
            seed=sample_seed(request.seed, turn) if turn else request.seed,
            logprobs=0, flat_logprobs=True,  # the sampled token's own, in one flat list, not a dict per token
            stop_token_ids=self.stop_ids, ignore_eos=True,  # not what the model's configuration says
            stop=self.stop if request.follow_up else None, detokenize=bool(request.follow_up and self.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        self.engine.add_request(name, {"prompt_token_ids": sample.prompt_ids + sample.response_ids}, params)

    def close(self) -> None:
        """Shut vLLM down, for every engine of this process."""
        self.engine.engine_core.shutdown()


def _clear_kv_cache(worker) -> None:
    """Attention multiplies the unused rest of a block by 0: a NaN left there is NaN in the next sequence, whatever its weights."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def _renew_packed(worker) -> None:
    """Stock vLLM multiplies by a packed copy of lm_head's weight, which `reload_weights` does not renew when the head is
    tied to the embedding: it would sample with the old one. Its experts' weights it leaves unpacked where its kernel wants
    them packed."""
    head = worker.model_runner.model.lm_head
    head.quant_method.process_weights_after_loading(head)
    for experts in _experts(worker.model_runner.model):
        experts.routed_experts.quant_method.moe_kernel.fused_experts.process_weights_after_loading(experts.routed_experts)


def _experts(model) -> list:
    """vLLM's experts, layer by layer, of a mixture of experts; empty otherwise."""
    return [module for module in model.modules() if hasattr(module, "routed_experts")]


def _record_experts(runner, scheduler) -> dict[str, torch.Tensor]:
    """Have vLLM's routers note whom they choose, in a table laid out as the KV cache, so that tokens which come from the prefix
    cache have their experts too. Returns a dict that fills itself: id of a finished request -> the experts of its tokens but the
    last, which is not fed. (vLLM's own enable_return_routed_experts needs a runner that needs Triton.)"""
    from vllm.forward_context import get_forward_context

    routers, free_blocks, found = [experts.router for experts in _experts(runner.model)], scheduler._free_blocks, {}
    if not routers:
        return found
    table = torch.zeros(scheduler.cache_config.num_gpu_blocks, kernels.BLOCK, len(routers), routers[0].top_k, dtype=torch.int16)

    def capture(chosen, layer):
        for at in list(get_forward_context().slot_mapping.values())[:1]:  # the same for all layers; none in a dry run
            table.flatten(0, 1)[at, layer] = chosen.to(torch.int16)

    def free(request):
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        found[request.request_id.split("-")[0]] = table[blocks].flatten(0, 1)[: request.num_tokens - 1]
        free_blocks(request)

    for i, router in enumerate(routers):
        router.set_capture_fn(lambda chosen, i=i: capture(chosen, i))
    scheduler._free_blocks = free
    return found


def _allocate_at_block_ends(manager) -> None:
    """Ask vLLM's KV-cache manager (v1/core/kv_cache_manager.py) for slots only when a sequence reaches the end of its
    block. In between there is nothing to allocate and no block to add to the prefix cache, yet asking for every sequence
    at every token took a seventh of the engine's time."""
    from vllm.v1.request import RequestStatus

    allocate_slots, nothing_new = manager.allocate_slots, manager.empty_kv_cache_blocks

    def allocate(request, num_new_tokens, *args, **kwargs):
        inside = request.num_computed_tokens % kernels.BLOCK
        if request.status == RequestStatus.RUNNING and 0 < inside < kernels.BLOCK - num_new_tokens:
            return nothing_new
        return allocate_slots(request, num_new_tokens, *args, **kwargs)

    manager.allocate_slots = allocate


def _use_plain_sampler(worker) -> None:
    """Sample as vLLM's CPU sampler does without top-k and top-p (v1/sample/ops/topk_topp_sampler.py, forward_cpu): the
    same log-softmax, the same Gumbel-argmax operator, one seed per token from the request's own generator. Only, seeds
    are drawn 64 at a time: one call of torch per sequence and token took a tenth of the engine's time."""
    sampler = worker.model_runner.sampler.topk_topp_sampler
    stock, seeds = sampler.forward, weakref.WeakKeyDictionary()  # generator -> seeds drawn and not yet used

    def next_seed(generator):
        drawn = seeds.setdefault(generator, [])
        if not drawn:
            drawn.extend(torch.randint(0, 2**31, (64,), generator=generator).tolist())
        return drawn.pop()

    def forward(logits, generators, k, p):
        if k is not None or p is not None or len(generators) != len(logits):
            return stock(logits, generators, k, p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        row_seeds = torch.tensor([next_seed(generators[i]) for i in range(len(logits))])
        return torch.ops._C.fused_gumbel_argmax(logits.float(), row_seeds), logprobs

    sampler.forward = forward


def _append_turn(sample: Sample, out) -> list[int]:
    """Append what vLLM sampled to the response; returns its token ids."""
    spans = {span.version for span in out.weight_versions}
    if spans != {str(sample.version)}:
        raise RuntimeError(f"a response was sampled by weights versions {sorted(spans)}, expected {sample.version} alone")
    ids = list(out.token_ids)
    if out.logprobs.token_ids != ids:
        raise RuntimeError("vLLM returned log-probabilities of other tokens than it sampled")
    logprobs = torch.tensor(out.logprobs.logprobs, dtype=torch.float32)  # exact: they were float32
    sample.logprobs = torch.cat([sample.logprobs, logprobs])
    sample.response_ids, sample.mask, sample.finish = sample.response_ids + ids, sample.mask + [1] * len(ids), out.finish_reason
    return ids


def _kv_cache_bytes(model, dtype, max_model_len, max_seqs, limit=4 << 30) -> int:
    """Room for every sequence at its full length, at most 4 GiB; vLLM preempts and recomputes when it is short."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = 4 if dtype == "float32" else 2
    block = kernels.BLOCK * 2 * config.num_hidden_layers * heads * kernels.head_size(config) * size
    sequence = -(-max_model_len // kernels.BLOCK) * block
    return max(min(sequence * (max_seqs + 1), limit), 2 * sequence)


class Weights(dict):
    """Parameter name of transformers -> tensor. On CUDA `written` is an event: they may be read once it has come."""

    written = None


class WeightStore:
    """Published weights by version. The learner publishes and drops, the rollout thread waits and reads.

    Tensors are handed over as they are: nobody may write to a published tensor. On CUDA what the learner has queued may
    still be writing when it publishes: it records an event, which the engine's stream waits for (kernels_cuda.reading).
    """

    def __init__(self):
        self._weights: dict[int, dict[str, torch.Tensor]] = {}
        self._changed = threading.Condition()

    def publish(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        if isinstance(weights, Weights):
            weights.written = kernels_cuda.written(weights)
        with self._changed:
            self._weights[version] = weights
            self._changed.notify_all()

    def drop_before(self, version: int) -> None:
        with self._changed:
            for old in [v for v in self._weights if v < version]:
                del self._weights[old]

    def get(self, version: int) -> dict[str, torch.Tensor]:
        with self._changed:
            return self._weights[version]

    def versions(self) -> list[int]:
        with self._changed:
            return sorted(self._weights)

    def wait(self, oldest: int, newest: bool, stop: threading.Event):
        """(version, weights) of `oldest` or, with `newest`, of the newest version there is, once version `oldest` has
        been published; None when `stop` is set first."""
        with self._changed:
            while not stop.is_set():
                if self._weights and max(self._weights) >= oldest:
                    version = max(self._weights) if newest else oldest
                    return version, self._weights[version]
                self._changed.wait(timeout=0.1)
        return None


class RolloutThread(threading.Thread):
    """Samples batches start, start + 1, ... and puts them into a queue, as far ahead as the lag allows.

    schedule "fixed": batch b is sampled by version max(0, b - lag), so which weights sample what does not depend on the
    threads' timing. "bound": by the newest version when it starts, at least b - lag.

    make_requests(b) -> list[Request] and grade(b, samples) -> texts, which sets rewards and groups, are the task's.
    An exception, or a call of the engine that takes longer than `timeout` seconds, is kept in `error`, and `on_error()`
    is called so that the main loop need not wait for it.
    """

    def __init__(self, engine, store, make_requests, grade, *, start, steps, lag, schedule, max_new_tokens, temperature,
                 timeout, threads, on_error):
        super().__init__(name="rollout", daemon=True)
        self.engine, self.store, self.make_requests, self.grade = engine, store, make_requests, grade
        self.first, self.steps, self.lag, self.schedule = start, steps, lag, schedule
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.timeout, self.threads, self.on_error = timeout, threads, on_error
        self.batches: queue.Queue[Batch] = queue.Queue()  # at most lag + 1, as the next batch needs newer weights
        self.evaluations: collections.deque = collections.deque()  # of the arguments of `evaluate`
        self.stop, self.error, self.busy_since = threading.Event(), None, None
        threading.Thread(target=self._watch, name="rollout-watchdog", daemon=True).start()

    # -- main loop's side

    def next(self, interrupted) -> Batch | None:
        """The next batch, waiting for it; None once `interrupted()` is true. Raises the thread's error, if it has one."""
        while True:
            if self.error is not None:
                raise self.error
            if interrupted():
                return None
            try:
                return self.batches.get(timeout=0.05)
            except queue.Empty:
                if not self.is_alive() and self.error is None and self.batches.empty():
                    raise RuntimeError("the rollout thread ended early") from None

    def evaluate(self, weights, version, requests, max_new_tokens, temperature, done) -> None:
        """Between two batches: generate `requests` with these weights and call done(samples, the engine's version at the end)
        in the thread. Training samples are not disturbed: each carries its own seed, each batch loads the version it needs."""
        self.evaluations.append((weights, version, requests, max_new_tokens, temperature, done))

    def close(self, wait: float = 10.0) -> bool:
        """Stop; False if the thread is still in a call of the engine after `wait` seconds."""
        self.stop.set()
        self.engine.cancelled = True
        self.join(wait)
        return not self.is_alive()

    # -- the thread

    def run(self) -> None:
        torch.set_num_threads(self.threads)
        try:
            with torch.no_grad():
                for b in range(self.first, self.steps):
                    batch = self._sample(b)
                    if batch is None:
                        return
                    self.batches.put(batch)
                while not self.stop.is_set():  # evaluations of the last updates
                    self._run_evaluations()
                    time.sleep(0.02)
        except BaseException as error:  # whatever it is, the run must hear of it
            if not self.stop.is_set():
                self._fail(error)

    def _sample(self, b: int) -> Batch | None:
        self._run_evaluations()
        found = self.store.wait(max(0, b - self.lag), self.schedule == "bound", self.stop)
        if found is None:
            return None
        version, weights = found
        start = time.perf_counter()
        samples, t_sync = self._generate(weights, version, self.make_requests(b), self.max_new_tokens, self.temperature)
        texts = self.grade(b, samples)
        self.busy_since = None
        return Batch(b, samples, texts, time.perf_counter() - start - t_sync, t_sync)

    def _run_evaluations(self) -> None:
        while self.evaluations and not self.stop.is_set():
            *arguments, done = self.evaluations[0]
            done(self._generate(*arguments)[0], self.engine.version)
            self.busy_since = None
            self.evaluations.popleft()  # after it is done: an empty deque means nothing is left to wait for

    def _generate(self, weights, version, requests, max_new_tokens, temperature) -> tuple[list[Sample], float]:
        """Samples, and the seconds that loading the weights took."""
        start = self.busy_since = time.monotonic()
        if self.engine.version != version:
            self.engine.load(weights, version)
        t_sync = time.monotonic() - start
        return self.engine.generate(requests, max_new_tokens, temperature, version), t_sync

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self.on_error()

    def _watch(self) -> None:
        while not self.stop.wait(0.2):
            since = self.busy_since
            if self.error is None and since is not None and time.monotonic() - since > self.timeout:
                self._fail(TimeoutError(f"rollout has hung for {self.timeout:g} s; a slow machine may need a larger --rollout-timeout"))
