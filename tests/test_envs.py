"""Tasks: what is right, what is trained on and what is held out; and the base model's recipe."""

import filecmp
import subprocess
import sys

import pytest

import base
from envs import Problem, last_boxed, load_env


@pytest.fixture(scope="module")
def tokenizer():
    return base.make_tokenizer()


@pytest.fixture(scope="module")
def arith(tokenizer):
    return load_env("arith", tokenizer)


@pytest.fixture(scope="module")
def chat_tokenizer():
    """Bytes as tokens, a chat template, and a tokenizer that puts <s> in front of what it encodes, as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    return tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Rewards

REWARDS = {
    r"11 16 25 \boxed{25}": 1,
    r"\boxed{24}": 0,
    "25": 0,  # no box
    "": 0,
    r"\boxed{24} no, \boxed{25}": 1,  # the last box counts
    r"\boxed{25} no, \boxed{24}": 0,
    r"\boxed{25": 0,  # never closed
    r"\boxed{25} and \boxed{2": 0,  # the last box counts, and it is no answer
    r"\boxed{25}}": 1,
    r"\boxed{{25}}": 0,  # a set is no integer
    r"\boxed{ 25 }": 1,
    "\\boxed{25\n}": 1,
    r"\boxed{2 5}": 0,
    r"\boxed{025}": 1,
    r"\boxed{+25}": 1,
    r"\boxed{-25}": 0,
    r"\boxed{25.0}": 0,
    r"\boxed{25.}": 0,
    r"\boxed{2_5}": 0,  # which int() would take
    r"\boxed{٢٥}": 0,  # which int() would take
    r"\boxed{x}": 0,
    r"\boxed{}": 0,
    r"boxed{25}": 0,
    r"\boxed {25}": 0,
    r"\boxed{25}<eos>": 1,  # special tokens are no text
    r"\boxed{25<pad>}": 1,
    r"\boxed{" + "9" * 10000 + "}": 0,  # int() raises on this
    r"\boxed{" + "0" * 18 + "25}": 1,
    r"\boxed{" * 10000: 0,
}


@pytest.mark.parametrize("response", REWARDS, ids=lambda r: repr(r)[:30])
def test_reward_is_1_for_the_right_last_closed_box_and_else_0(arith, response):
    reward = arith.reward(Problem("9+2+5+9=", "25"), response)
    assert type(reward) is float and reward == REWARDS[response]


def test_a_negative_answer_needs_its_sign(arith):
    problem = Problem("2-9=", "-7")
    assert arith.reward(problem, r"\boxed{-7}") == 1
    assert arith.reward(problem, r"\boxed{7}") == arith.reward(problem, r"\boxed{--7}") == arith.reward(problem, r"\boxed{- 7}") == 0


def test_last_boxed_balances_braces():
    assert last_boxed(r"\boxed{\frac{1}{2}} and so on}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1} \boxed{\boxed{2}}") == "2"  # the last that opens
    assert last_boxed("no box") is None and last_boxed(r"\boxed{{1}") is None


# ---------------------------------------------------------------------------------------------------------------------
# Problems


@pytest.mark.parametrize("difficulty", [2, "3", 4, 9, "words"])
def test_training_and_heldout_problems_never_meet(tokenizer, difficulty):
    heldout = {p.prompt for p in load_env("arith", tokenizer, 0, difficulty).heldout(300)}
    assert heldout
    for seed in (0, 1, 12345):
        env = load_env("arith", tokenizer, seed, difficulty)
        trained = {p.prompt for batch in range(30) for p in env.train(batch, 32)}
        assert trained and not trained & heldout


def test_answers_are_right(tokenizer):
    for difficulty in (2, 4, 12):
        for p in load_env("arith", tokenizer, 3, difficulty).train(0, 50):
            assert p.prompt.endswith("=") and p.prompt.count("+") == difficulty - 1
            assert eval(p.prompt[:-1]) == int(p.answer)
    digits = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    for p in load_env("arith", tokenizer, 3, "words").train(0, 50):
        a, b = (digits.index(w) for w in p.prompt.removeprefix("What is ").removesuffix("?").split(" times "))
        assert a * b == int(p.answer)


def test_a_training_batch_is_a_pure_function_of_seed_batch_and_index(tokenizer):
    env = load_env("arith", tokenizer, 7)
    assert env.train(5, 16) == load_env("arith", tokenizer, 7).train(5, 16)  # whatever was drawn before
    assert env.train(5, 16)[:4] == env.train(5, 4)
    assert env.train(5, 16) != env.train(6, 16) != load_env("arith", tokenizer, 8).train(6, 16)
    code = "import base, envs; print([p.prompt for p in envs.load_env('arith', None, 7).train(5, 16)])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=base.__file__.rpartition("/")[0], check=True)
    assert other.stdout.strip() == str([p.prompt for p in env.train(5, 16)])


def test_heldout_problems_differ_from_each_other_and_not_between_seeds(tokenizer):
    problems = load_env("arith", tokenizer, 0).heldout(256)
    assert len(problems) == len(set(problems)) == 256
    assert problems == load_env("arith", tokenizer, 9).heldout(256)
    assert problems[:10] == load_env("arith", tokenizer, 9).heldout(10)
    assert 0 < len(load_env("arith", tokenizer, 0, "words").heldout(256)) < 30  # there are no more


@pytest.mark.parametrize("difficulty", [1, 0, -3, "x", "100", "4.5", " "])
def test_a_difficulty_that_cannot_be_is_refused_with_the_flag_named(tokenizer, difficulty):
    with pytest.raises(ValueError, match="^--difficulty "):
        load_env("arith", tokenizer, 0, difficulty)


# ---------------------------------------------------------------------------------------------------------------------
# Prompts


def test_a_prompt_without_a_chat_template_is_the_problem_alone(arith, tokenizer):
    ids = arith.prompt_ids(Problem("3+8+5+9=", "25"))
    assert tokenizer.decode(ids) == "3+8+5+9=" and len(ids) == 8


def test_a_prompt_in_a_chat_template_has_the_instruction_and_each_special_token_once(chat_tokenizer):
    env = load_env("arith", chat_tokenizer, 0, "words")
    ids = env.prompt_ids(Problem("What is two times three?", "6"))
    assert ids.count(chat_tokenizer.bos_token_id) == 1 and ids[0] == chat_tokenizer.bos_token_id
    assert chat_tokenizer.decode(ids[1:]) == "[user] What is two times three?\nPut your final answer within \\boxed{}.\n[assistant] "


def test_the_base_tokenizer_gives_back_every_text_of_the_task(arith, tokenizer):
    text = "3+8+5+9=11 16 25 \\boxed{25}"
    assert tokenizer.decode(tokenizer.encode(text)) == text and len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode("Ä")) == "?"
    assert len(tokenizer) == 66 - 2


# ---------------------------------------------------------------------------------------------------------------------
# The base model


def equal_folders(a, b) -> bool:
    names = sorted(p.name for p in a.iterdir())
    return names == sorted(p.name for p in b.iterdir()) and filecmp.cmpfiles(a, b, names, shallow=False)[0] == names


@pytest.mark.parametrize("task", ["arith", "calc"])
def test_the_base_model_is_the_same_bytes_for_the_same_seed_and_made_once(task, tmp_path, monkeypatch):
    import torch

    for key, value in {"steps": 20, "batch": 4}.items():  # the recipe's shape, not its length
        monkeypatch.setitem(base.WARM_START[task], key, value)
    made = []
    for name in ("a", "b"):
        monkeypatch.setenv("REINFORCE_ZERO_CACHE", str(tmp_path / name))
        torch.rand(len(made) + 1)  # the global generator's state has no say
        made.append(base.make_base(task, progress=False))
    assert equal_folders(*made)
    assert not equal_folders(made[0], base.make_base(task, seed=1, progress=False))
    monkeypatch.setattr(base, "warm_start", None)  # cannot be made again
    assert base.make_base(task) == made[1]
    assert {p.name for p in (tmp_path / "a").iterdir()} == {made[0].name}  # no scratch left


@pytest.mark.soak
def test_the_whole_base_model_is_the_same_bytes_for_the_same_seed_and_solves_about_half(tmp_path, monkeypatch, base_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("REINFORCE_ZERO_CACHE", str(tmp_path))
    assert equal_folders(base.make_base(progress=False), base_model)
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    env = load_env("arith", tokenizer)
    problems = env.heldout(512)
    responses = base.sample(AutoModelForCausalLM.from_pretrained(base_model, dtype="float32"), tokenizer, [env.prompt_ids(p) for p in problems])
    assert 0.35 < sum(env.reward(p, r) for p, r in zip(problems, responses)) / 512 < 0.65
