"""Tasks: what is right, what is trained on and what is held out; and the base model's recipe."""

import copy
import filecmp
import gzip
import json
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import Beside

import base
from envs import Dataset, Problem, grade, last_boxed, load_env, read_problems, too_long


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
    assert chat_tokenizer.decode(ids[1:]) == "[user] What is two times three?\nAnswer with a number.\n[assistant] "
    boxed = load_env("arith", chat_tokenizer).prompt_ids(Problem("1+2=", "3"))
    assert chat_tokenizer.decode(boxed[1:]) == "[user] 1+2=\nPut your final answer within \\boxed{}.\n[assistant] "


@pytest.mark.parametrize("response, reward", [("It is 42.", 1), ("6 x 7 = 42", 1), ("42 is 6 times 7", 0), ("42.0", 0), ("1,042", 0), ("-42", 0),
                                              ("4" * 50 + "2", 0), ("forty-two", 0), ("", 0), ("so \\boxed{42}", 1)])  # fmt: skip
def test_in_words_the_last_number_is_the_answer(chat_tokenizer, response, reward):
    assert load_env("arith", chat_tokenizer, 0, "words").reward(Problem("What is six times seven?", "42"), response) == reward


def test_a_template_that_gives_the_date_gives_the_same_prompt_every_day(tokenizer, chat_tokenizer):
    dated = copy.deepcopy(chat_tokenizer)
    dated.chat_template = "{{ strftime_now('%d %b %Y') }} " + dated.chat_template
    assert "01 Jan 2025" in dated.decode(load_env("arith", dated).prompt_ids(Problem("1+1=", "2")))


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
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("REINFORCE_ZERO_CACHE", str(tmp_path))
    assert equal_folders(base.make_base(progress=False), base_model)
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    env = load_env("arith", tokenizer)
    problems = env.heldout(512)
    prompts = torch.tensor([env.prompt_ids(p) for p in problems])  # all of one length
    model, settings = AutoModelForCausalLM.from_pretrained(base_model, dtype="float32"), dict(do_sample=True, top_k=0, max_new_tokens=48)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        responses = tokenizer.batch_decode(model.generate(prompts, **settings)[:, prompts.shape[1] :], skip_special_tokens=True)
    assert 0.35 < sum(env.reward(p, r) for p, r in zip(problems, responses)) / 512 < 0.65


# ---------------------------------------------------------------------------------------------------------------------
# Data sets

DATA = Beside()
FILES = {  # (file, task): rows
    ("gsm8k_train.jsonl.gz", "gsm8k"): 7473,
    ("gsm8k_test.jsonl", "gsm8k"): 1319,
    ("math500.jsonl", "math"): 500,
    ("aime24.jsonl", "jsonl"): 30,
    ("aime25.jsonl", "jsonl"): 30,
    ("amc23.jsonl", "jsonl"): 40,
    ("minerva.json", "jsonl"): 272,
    ("olympiadbench.json", "jsonl"): 675,
    ("dapo_math_17k.parquet", "dapo"): 17917,
    ("countdown_train.parquet", "countdown"): 10240,
    ("countdown_test.parquet", "countdown"): 1024,
    ("mawps.jsonl", "jsonl"): 2065,
}


def problems_of(file, name="jsonl", **options):
    return read_problems(file, f"--data {file}", name, **options)


def write(path, *rows) -> pathlib.Path:
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return path


def numbered(n: int) -> list[dict]:
    return [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(n)]


@pytest.mark.parametrize("file, name", FILES, ids=lambda x: x)
def test_every_file_of_the_shared_data_loads_with_all_its_rows(file, name, chat_tokenizer):
    problems, skipped = problems_of(DATA / file, name)
    assert len(problems) == FILES[file, name] and skipped == 0
    task = load_env(name, chat_tokenizer, data=str(DATA / file))
    distinct = {p.prompt for p in problems}
    assert len(task.problems) + len(task.test) == len(distinct) == len({p.prompt for p in task.problems + task.test})
    assert len(distinct) == {"dapo_math_17k.parquet": 17290, "mawps.jsonl": 1981}.get(file, len(problems))
    assert 0.08 < len(task.test) / len(distinct) < 0.18 or len(distinct) < 100
    for p in problems[:20]:
        assert chat_tokenizer.decode(task.prompt_ids(p)).count("\\boxed") == 1


def test_answers_are_read_from_each_kind_of_field():
    def first(file, name="jsonl"):
        return problems_of(DATA / file, name)[0][0].answer

    assert first("gsm8k_test.jsonl", "gsm8k") == "18" and first("gsm8k_train.jsonl.gz", "gsm8k") == "72"
    assert first("amc23.jsonl") == "27" and first("aime24.jsonl") == "204" and first("minerva.json") == "9.6"  # 27.0, 204, ["9.6\n"]
    assert first("dapo_math_17k.parquet", "dapo") == "34" and first("math500.jsonl", "math") == r"\left( 3, \frac{\pi}{2} \right)"
    assert first("countdown_test.parquet", "countdown") == "47 76 55 60 = 24" and first("mawps.jsonl") == "43"


@pytest.mark.parametrize("file", ["gsm8k_test.jsonl", "math500.jsonl", "amc23.jsonl", "minerva.json", "olympiadbench.json"])
def test_a_problems_own_answer_in_a_box_is_right_and_another_problems_is_not(file, chat_tokenizer):
    problems = problems_of(DATA / file, "gsm8k" if "gsm8k" in file else "jsonl")[0][:24]
    task = Dataset("jsonl", chat_tokenizer, 0, problems)
    own = [f"So \\boxed{{{p.answer if isinstance(p.answer, str) else p.answer[-1]}}}." for p in problems]
    assert grade(task, problems, own) == [1.0] * len(problems)
    assert grade(task, problems, ["no answer"] * len(problems)) == [0.0] * len(problems)
    assert sum(grade(task, problems, own[1:] + own[:1])) < len(problems) / 4


def test_each_of_several_answers_is_right(chat_tokenizer):
    task = Dataset("jsonl", chat_tokenizer, 0, [])
    several, single = Problem("q", ("0.01", "0.02")), Problem("r", "3")
    responses = [r"\boxed{0.01}", r"\boxed{3}", r"\boxed{0.02}", r"\boxed{0.03}", r"\boxed{4}"]
    assert grade(task, [several, single, several, several, single], responses) == [1, 1, 1, 0, 0]


def test_an_epoch_holds_every_problem_once_and_the_next_has_another_order(chat_tokenizer):
    problems = [Problem(f"{i}?", str(i)) for i in range(103)]
    task = Dataset("jsonl", chat_tokenizer, 3, problems, test=[])
    drawn = [p for batch in range(103) for p in task.train(batch, 10)]  # 10 epochs; batches lie across their borders
    epochs = [drawn[i : i + 103] for i in range(0, 1030, 103)]
    assert all(set(epoch) == set(problems) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 10 and epochs[0] != problems
    assert Dataset("jsonl", chat_tokenizer, 4, problems, test=[]).train(0, 10) != task.train(0, 10)
    assert set(task.train(0, 300)) == set(problems)  # a batch larger than the data set


def test_a_data_sets_batches_are_the_same_in_every_process(chat_tokenizer, tmp_path):
    file = write(tmp_path / "p.jsonl", *numbered(50))
    task = load_env("jsonl", chat_tokenizer, 7, data=str(file))
    task.train(20, 8)  # whatever was drawn before
    code = f"import envs; print([p.prompt for p in envs.load_env('jsonl', None, 7, data={str(file)!r}).train(9, 8)])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path(base.__file__).parent)
    assert other.stdout.strip() == str([p.prompt for p in task.train(9, 8)]), other.stderr


def test_held_out_problems_of_a_file_are_never_trained_on_and_those_of_a_test_split_neither(chat_tokenizer, tmp_path):
    file = write(tmp_path / "p.jsonl", *numbered(400), *numbered(400))  # every problem twice
    tasks = [load_env("jsonl", chat_tokenizer, seed, data=str(file)) for seed in (0, 1)]
    assert tasks[0].heldout(30) == tasks[1].heldout(30) and len(tasks[0].heldout(10**6)) + len(tasks[0].problems) == 400
    for task in tasks:
        trained = [p for batch in range(len(task.problems) // 5) for p in task.train(batch, 5)]
        assert len(set(trained)) == len(trained) and not set(trained) & set(task.heldout(10**6))
    prompts = [p.prompt for p in tasks[0].heldout(10**6)]
    assert prompts != sorted(prompts, key=lambda p: int(p.split()[2]))  # not only the file's first
    test = [Problem("a?", "1"), Problem("b?", "2")]
    task = Dataset("gsm8k", chat_tokenizer, 0, [Problem("a?", "1"), Problem("c?", "3"), Problem("c?", "4")], test)
    assert task.heldout(9) == test and task.train(0, 2) == [Problem("c?", "3")] * 2


def test_prompts_of_a_data_set_have_the_instruction_once_with_and_without_a_template(tokenizer, chat_tokenizer):
    problem, asking = Problem("Why?", "1"), Problem("Why? Put it in \\boxed{}.", "1")
    task = Dataset("jsonl", chat_tokenizer, 0, [])
    text = chat_tokenizer.decode(task.prompt_ids(problem))
    assert text.startswith("<s>[user] Why?\nPlease reason") and text.endswith("[assistant] ") and text.count("<s>") == 1
    assert chat_tokenizer.decode(task.prompt_ids(asking)) == "<s>[user] Why? Put it in \\boxed{}.\n[assistant] "
    plain = Dataset("jsonl", tokenizer, 0, [])
    assert len(plain.prompt_ids(asking)) == len(asking.prompt) + 1  # the base tokenizer has one token a character


def test_prompts_that_are_too_long_are_those_that_tokenizing_all_finds(chat_tokenizer):
    problems = [Problem("ö" * i, "1") for i in range(60)] + [Problem("x \\boxed " * 12, "2")]
    task = Dataset("jsonl", chat_tokenizer, 0, [])
    for limit in (0, 100, 130, 200, 999):
        assert too_long(task, problems, limit) == [p for p in problems if len(task.prompt_ids(p)) > limit]


# -- rows

GOOD = {"question": "What is 8 + 1?", "answer": "9"}
BAD_ROWS = {
    "no JSON": b'{"question": "cut o',
    "not an object": [1, 2],
    "no prompt": {"answer": "2"},
    "no answer": {"question": "q"},
    "null": {"question": "q", "answer": None},
    "empty prompt": {"question": " \n", "answer": "2"},
    "empty answer": {"question": "q", "answer": " "},
    "a number as prompt": {"question": 3, "answer": "2"},
    "an object as answer": {"question": "q", "answer": {"a": 1}},
    "true as answer": {"question": "q", "answer": True},
    "NaN": b'{"question": "q", "answer": NaN}',
    "no answers": {"question": "q", "answer": []},
    "a solution without a box": {"question": "q", "solution": "It is 3."},
    "no message of a user": {"prompt": [{"role": "system", "content": "x"}], "answer": "2"},
    "not UTF-8": b'{"question": "\xff\xfe", "answer": "2"}',
    "half a surrogate pair": b'{"question": "\\ud800", "answer": "2"}',
    "nested too deeply": b'{"question": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_row_that_cannot_be_read_is_refused_with_its_number_unless_it_is_to_be_skipped(kind, tmp_path, chat_tokenizer):
    file = write(tmp_path / "p.jsonl", GOOD, b"", *numbered(3), BAD_ROWS[kind], GOOD, BAD_ROWS[kind])
    with pytest.raises(ValueError, match=rf"^--data {file}: row 6: .*bad rows: 2; --skip-bad-rows") as error:
        load_env("jsonl", chat_tokenizer, data=str(file))
    assert "\n" not in str(error.value)
    task = load_env("jsonl", chat_tokenizer, data=str(file), skip_bad_rows=True)
    assert len(task.problems) + len(task.test) == 4 and "2 rows skipped" in task.note


@pytest.mark.parametrize("nums, target", [([1, "2"], 3), ([1.5, 2], 3), ([], 3), ("1 2", 3), ([1, 2], None), ([1, True], 2)])
def test_a_countdown_row_needs_integers(nums, target, tmp_path):
    with pytest.raises(ValueError, match="row 2: "):
        problems_of(write(tmp_path / "c.jsonl", {"nums": [1, 2], "target": 3}, {"nums": nums, "target": target}), "countdown")


def test_a_gsm8k_row_without_its_mark_is_bad():
    with pytest.raises(ValueError, match="row 1: answer holds no answer"):
        read_problems(DATA / "math500.jsonl", "--data x", "gsm8k")


def test_files_without_a_problem_or_that_are_no_data_are_refused(tmp_path, chat_tokenizer):
    contents = {"empty": b"", "blank": b"\n \n\n", "list": b"[]", "cut.gz": gzip.compress(b"x" * 999)[:20], "cut.parquet": b"PAR1xx", "cut.json": b"[1,"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in [*contents, "missing", "."]:
        with pytest.raises(ValueError, match=f"^--data {tmp_path / name}: (holds no problem|cannot read)") as error:
            load_env("jsonl", chat_tokenizer, data=str(tmp_path / name))
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="holds no problem"):
        load_env("jsonl", chat_tokenizer, data=str(write(tmp_path / "bad.jsonl", b"{")), skip_bad_rows=True)
    with pytest.raises(ValueError, match="^--env jsonl: --data FILE"):
        load_env("jsonl", chat_tokenizer)


def test_unicode_line_ends_and_a_byte_order_mark_survive(tmp_path, chat_tokenizer):
    texts = ["Wie groß ist ½ + ¼?", "一加一等于多少？", "كم ٢ + ٢؟", "line\u2028separator\x85 \x0band", "🧮👩‍🔬", "e\u0301 is not \u00e9"]
    rows = [json.dumps({"question": t, "answer": t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)]
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    problems, _ = problems_of(tmp_path / "p.jsonl")
    assert problems == [Problem(t, t) for t in texts]
    task = Dataset("jsonl", chat_tokenizer, 0, problems)
    for p in problems:
        assert p.prompt in chat_tokenizer.decode(task.prompt_ids(p), clean_up_tokenization_spaces=False)


def test_the_four_kinds_of_file_hold_the_same_problems(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = numbered(7)
    (tmp_path / "p.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "p.gz").write_bytes(gzip.compress(write(tmp_path / "p.jsonl", *rows).read_bytes()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    lists = [problems_of(tmp_path / f"p.{kind}")[0] for kind in ("jsonl", "json", "gz", "parquet")]
    assert lists[0] == [Problem(r["question"], r["answer"]) for r in rows] and all(x == lists[0] for x in lists)


def test_fields_can_be_named_and_a_name_that_is_not_there_or_no_name_is_refused(tmp_path):
    file = write(tmp_path / "p.jsonl", {"q": "Why?", "question": "no", "meta": {"gold": 7}, "answer": "no"})
    assert problems_of(file, data_fields="prompt=q,answer=meta.gold")[0] == [Problem("Why?", "7")]
    with pytest.raises(ValueError, match="row 1: no field gold; --data-fields answer=NAME"):
        problems_of(file, data_fields="answer=gold")
    for fields in ("q", "prompt=", "promt=q"):
        with pytest.raises(ValueError, match=f"^--data-fields {fields}: "):
            problems_of(file, data_fields=fields)


def test_a_hub_that_cannot_be_reached_is_one_line_that_names_data():
    code = "import envs, sys\ntry: envs.load_env('gsm8k', None)\nexcept ValueError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path(base.__file__).parent,
                          env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})  # fmt: skip
    assert done.stdout.startswith("--env gsm8k, or --data FILE: cannot read ('openai/gsm8k', 'main', 'train')"), done.stderr
    assert done.stdout.count("\n") == 1


# -- countdown

EXPRESSIONS = {  # with 3 4 5 5, to make 35
    "(3 + 4) * 5 * 5 / 5": 0,  # one 5 too many
    "(3+4)*5+5-5": 0,
    "5*(3+4)": 0,  # one unused
    "5 * (3 + 4 * 5 / 5)": 0,
    "(5 + 5) * (3 + 4) / 2": 0,
    "5*4+3*5": 1,
    "5*4+3*5 = 35": 1,
    r"5 \times 4 + 3 \cdot 5": 1,
    "5×4+5×3": 1,
    r"\left(5*4\right)+(3*5)": 1,
    "35": 0,
    "3*5+4*5.0": 0,
    "5*4+3*5+0": 0,
    "5**4+3-5": 0,
    "5*4+3*+5": 0,
    "5*4--3*5": 0,
    "5(4)+3*5": 0,
    "5*4+3*5)": 0,
    "4*5+3*05": 0,
    "5//4+3*5": 0,
    "5/(4-4)+3*5": 0,
    "5/(5-5)+3*4": 0,  # division by zero
    "__import__('os')": 0,
    "x": 0,
    "": 0,
    "(" * 5000 + "5": 0,
    "9**9**9**9": 0,
    "五*4+3*5": 0,
}


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda e: repr(e)[:30])
def test_countdown_rewards_an_expression_that_uses_each_number_once_and_gives_the_target(expression, chat_tokenizer):
    task = Dataset("countdown", chat_tokenizer, 0, [])
    assert grade(task, [Problem("", "3 4 5 5 = 35")], [f"Let me see: \\boxed{{{expression}}}"]) == [EXPRESSIONS[expression]]


def test_countdown_divides_exactly_and_takes_the_files_own_solutions(chat_tokenizer):
    import pyarrow.parquet

    task = Dataset("countdown", chat_tokenizer, 0, [])
    assert grade(task, [Problem("", "1 3 3 8 = 24")], [r"\boxed{8 / (3 - 8 / 3)}"]) == [0]
    assert grade(task, [Problem("", "3 3 8 8 = 24")], [r"\boxed{8 / (3 - 8 / 3)}"]) == [1]
    problems = problems_of(DATA / "countdown_test.parquet", "countdown")[0]
    solutions = [row[-1].partition("equation is")[2] for row in pyarrow.parquet.read_table(DATA / "countdown_test.parquet")["hint"].to_pylist()]
    assert sum(grade(task, problems, [f"\\boxed{{{s.strip()}}}" for s in solutions])) == len(problems) == 1024
    assert sum(grade(task, problems, [f"\\boxed{{{s.strip()}}}" for s in solutions[1:] + solutions[:1]])) == 0
