"""The Python package on models of some thousand parameters, with the real engine and program."""

import json
import shutil
import subprocess
import threading
import time

import numpy as np
import pytest

import elapid

CODE = (
    "fn add(a: i32, b: i32) -> i32 {\n    a + b\n}\n\n"
    "fn sub(a: i32, b: i32) -> i32 {\n    a - b\n}\n\n"
)
TEXT = CODE * 20
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SETTINGS = {"context": 64, "rows": 2, "lr": 3e-3, "spike": None}


@pytest.fixture(scope="session")
def trained():
    model = elapid.scratch(TEXT, arch="hybrid", device="cpu", threads=2)
    trainer = elapid.Trainer(model, TEXT, steps=20, **SETTINGS)
    trainer.train()
    return model, trainer


@pytest.fixture(scope="session")
def saved(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    trained[0].save(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def model(saved):
    return elapid.load(saved, device="cpu", threads=2)


def test_training_lowers_the_loss_and_callbacks_hear_every_step(trained):
    _, trainer = trained
    assert trainer.losses.dtype == np.float32 and trainer.losses.shape == (20,)
    assert trainer.losses[-1] < 0.8 * trainer.losses[0]
    assert [step.step for step in trainer.steps] == list(range(1, 21))
    assert trainer.n_trained == trainer.n_params


def test_a_callback_that_returns_false_ends_the_training(saved):
    model = elapid.load(saved, device="cpu", threads=2)
    heard = []
    elapid.Trainer(model, TEXT, steps=9, **SETTINGS).train(heard.append, lambda s: s.step < 3)
    assert [step.step for step in heard] == [1, 2, 3]
    assert model.generate("fn", max_tokens=1) is not None


def test_the_same_seed_writes_the_same_text_and_streams_join_to_it(model):
    options = {"max_tokens": 24, "temperature": 0.9, "seed": 7}
    whole = model.generate("fn add(", **options)
    stream = model.generate("fn add(", stream=True, **options)
    assert "".join(stream) == whole and whole
    assert stream.finish_reason in ("stop", "length") and 1 <= stream.n_tokens <= 24


def test_streams_that_are_closed_make_room_for_others(model):
    for _ in range(4):
        stream = model.generate("fn add(", stream=True, max_tokens=200, temperature=0.0)
        next(stream)
        stream.close()
    kept = [model.generate("fn", stream=True, max_tokens=200) for _ in range(2)]
    with pytest.raises(elapid.Error, match="not finished"):
        model.generate("fn")
    kept.clear()  # forgotten is closed
    assert model.generate("fn add(", max_tokens=4, temperature=0.0)


def test_constraints_hold(model):
    assert model.generate("n = ", regex="[0-9]{3}", max_tokens=8).isdigit()
    schema = {"enum": ["one", "two"]}
    assert json.loads(model.generate("fn", json_schema=schema, max_tokens=40)) in ("one", "two")
    with pytest.raises(elapid.Error, match="one constraint"):
        model.generate("", regex="a", json_schema=schema)


def test_chat_takes_messages_or_a_text(model):
    messages = [{"role": "user", "content": "What does add do?"}]
    options = {"max_tokens": 8, "temperature": 0.0}
    assert model.chat(messages, **options) == model.chat("What does add do?", **options)


def test_embeddings_are_rows_of_length_one(model):
    one, many = model.embed("fn add("), model.embed(["fn add(", "}\n"])
    assert many.shape == (2, model.info["d_model"]) and many.dtype == np.float32
    np.testing.assert_array_equal(one, many[0])
    np.testing.assert_allclose(np.linalg.norm(many, axis=1), 1, atol=1e-5)
    assert model.embed([]).shape == (0, model.info["d_model"])


def test_tokens_are_arrays_and_come_back_as_text(model):
    ids = model.tokens(CODE)
    assert ids.dtype == np.uint32 and model.text(ids) == CODE
    assert model.text(ids[:0]) == ""


def test_scores_and_the_verdict_of_a_comparison(trained, saved):
    fresh = elapid.scratch(TEXT, arch="hybrid", device="cpu", threads=2)
    texts = {f"mul{n}.rs": f"fn mul{n}(a: i32) -> i32 {{\n    a * {n}\n}}\n" for n in range(8)}
    found = elapid.evaluate(trained[0], texts, compare=fresh, context=64)
    assert found.verdict == "better" and found.gain > 0 and "fewer bits" in found.summary
    assert found.scores.names == list(texts)
    assert found.scores.n_bytes.sum() == sum(map(len, texts.values()))
    bits = found.scores.nll.sum() / found.scores.n_bytes.sum() / np.log(2)
    assert found.scores.bits_per_byte == pytest.approx(bits)
    # What was written is read back with the same scores.
    again = elapid.load(saved, device="cpu", threads=2).score(texts, context=64)
    np.testing.assert_array_equal(again.nll, found.scores.nll)


def test_texts_are_measured_on_the_way_as_afterwards(saved):
    model = elapid.load(saved, device="cpu", threads=2)
    trainer = elapid.Trainer(
        model, TEXT, steps=4, eval_texts=[CODE], eval_every=2, **SETTINGS
    ).train()
    assert trainer.evals[:, 0].tolist() == [1, 2, 4]
    assert trainer.evals[-1, 1] == pytest.approx(model.score([CODE], context=64).bits_per_byte)


def test_a_checkpoint_continues_to_the_bit(saved, tmp_path):
    whole = elapid.Trainer(
        elapid.load(saved, device="cpu", threads=2), TEXT, steps=4, **SETTINGS)
    for step in whole:
        if step.step == 2:
            whole.save_checkpoint(tmp_path / "two.elapid")
    again = elapid.load(saved, device="cpu", threads=2)
    rest = elapid.Trainer(again, TEXT, steps=4, **SETTINGS)
    assert rest.resume(tmp_path / "two.elapid") == 2
    rest.train()
    np.testing.assert_array_equal(rest.losses, whole.losses[2:])
    np.testing.assert_array_equal(again.embed("fn"), whole.model.embed("fn"))


def test_a_lora_adapter_is_saved_and_loaded_beside_its_base(saved, tmp_path):
    model = elapid.load(saved, device="cpu", threads=2)
    trainer = elapid.Trainer(model, TEXT, method="lora", rank=4, steps=4, **SETTINGS)
    assert trainer.n_trained < trainer.n_params
    trainer.train()
    model.save(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    loaded = elapid.load(saved, adapter=tmp_path / "adapter", device="cpu", threads=2)
    texts = [CODE]
    assert loaded.score(texts).nll == pytest.approx(model.score(texts).nll, rel=1e-6)


def test_a_model_in_training_does_not_answer(saved):
    model = elapid.load(saved, device="cpu", threads=2)
    stream = model.generate("fn", stream=True)
    with elapid.Trainer(model, TEXT, steps=2, **SETTINGS) as trainer:
        next(trainer)
        with pytest.raises(elapid.Error, match="in training"):
            model.generate("fn")
        with pytest.raises(elapid.Error, match="was trained while it answered"):
            next(stream)
    assert isinstance(model.generate("fn", max_tokens=2), str)
    with pytest.raises(StopIteration):
        next(trainer)


def test_conversion_is_equal_in_f32_and_close_when_quantized(saved, tmp_path):
    assert elapid.convert(saved, tmp_path / "m.gguf")["verdict"] == "equal"
    done = elapid.convert(saved, tmp_path / "small.gguf", type="q8_0")
    assert done["verdict"] == "close" and done["n_bytes"] > 0
    assert elapid.load(tmp_path / "small.gguf").generate("fn", max_tokens=2) is not None


def test_errors_say_what_to_do():
    with pytest.raises(elapid.Error) as raised:
        elapid.load("no-such-model.gguf")
    assert ".gguf" in raised.value.hint and f"hint: {raised.value.hint}" in raised.value.__notes__
    with pytest.raises(elapid.Error, match="no size `huge`") as raised:
        elapid.scratch(TEXT, size="huge")
    assert "tiny" in raised.value.hint
    with pytest.raises(elapid.Error, match="no device `tpu`"):
        elapid.scratch(TEXT, device="tpu")


def test_settings_that_do_not_exist_are_refused_and_leave_the_model_usable(model):
    with pytest.raises(elapid.Error, match="no setting `lrate`"):
        elapid.Trainer(model, TEXT, lrate=1)
    with pytest.raises(elapid.Error, match="temprature"):
        model.generate("fn", temprature=1)
    with pytest.raises(ValueError, match="rank"):
        elapid.Trainer(model, TEXT, rank=4)
    assert isinstance(model.generate("fn", max_tokens=2), str)


def test_other_threads_run_while_a_model_computes(model):
    n_turns = 0
    is_over = False

    def count():
        nonlocal n_turns
        while not is_over:
            n_turns += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=count)
    thread.start()
    model.score([TEXT * 4], context=64)  # one call
    is_over = True
    thread.join()
    assert n_turns > 1


def test_devices_are_listed():
    assert "cpu" in elapid.devices()


needs_program = pytest.mark.skipif(not shutil.which("elapid"), reason="the program is not built")


@needs_program
def test_a_project_is_adapted_with_a_certificate(saved, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    for n in range(12):
        names = [f"take_{n}_{k}" for k in range(4)]
        body = "".join(f"def {name}(value):\n    return value + {n}\n\n\n" for name in names)
        (project / f"part{n}.py").write_text(f'"""Part {n}."""\n\n{body}' + f"TABLE = {n * n}\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b.c",
                                                 "commit", "-qm", "parts"]):
        subprocess.run(["git", *words], cwd=project, check=True)
    heard = []
    done = elapid.adapt(project, model=saved, steps=4, device="cpu", on_event=heard.append)
    assert done is not None
    assert done.path.parent.parent.name == ".elapid" and done.certificate
    assert done.verdict and done.before > 0 and done.after > 0
    assert any(event["kind"] == "step" for event in heard)
    assert isinstance(elapid.load(done.path).generate("def ", max_tokens=4), str)
    with pytest.raises(elapid.Error) as raised:
        elapid.adapt(tmp_path / "nowhere")
    assert raised.value.hint


@needs_program
def test_a_name_is_what_the_program_knows():
    model = elapid.load("elapid-code", device="cpu", threads=2)
    assert model.info["n_params"] > 20_000_000
    assert model.infill("def add(a, b):\n    ", "\n\n\nprint(add(1, 2))\n",
                        max_tokens=12, temperature=0.0)
    with pytest.raises(elapid.Error, match="nobody/nothing"):
        elapid.load("nobody/nothing")
