"""msprobe dumps: what its own comparison passes in silence ends here in a failure or a clear error."""

from __future__ import annotations

import copy
import json
import sys

import pytest

from alignment.cli import main


def tensor(norm, *, mean=0.1, high=2.0, low=-2.0):
    return {
        "type": "torch.Tensor", "dtype": "torch.float32", "shape": [4, 8], "Max": high, "Min": low, "Mean": mean,
        "Norm": norm, "requires_grad": True,
    }  # fmt: skip


def call(*, inputs=5.0, outputs=6.0):
    return {"input_args": [tensor(inputs)], "input_kwargs": {}, "output": [tensor(outputs)]}


CALLS = {
    "Module.model.layers.0.attn.Attention.forward.0": call(outputs=6.0),
    "Module.model.layers.0.act.SiLU.forward.0": call(inputs=6.0, outputs=7.0),
    "Module.model.layers.1.attn.Attention.forward.0": call(inputs=7.0, outputs=8.0),
}


def dump(folder, calls=CALLS, *, level="L0"):
    folder.mkdir(parents=True)
    about = {"task": "statistics", "level": level, "framework": "pytorch", "dump_data_dir": None, "data": calls}
    (folder / "dump.json").write_text(json.dumps(about))
    (folder / "construct.json").write_text(json.dumps(dict.fromkeys(calls)))
    (folder / "stack.json").write_text("{}")
    return folder


def changed(name, **values):
    calls = copy.deepcopy(CALLS)
    calls[name]["output"][0].update(values)
    return calls


@pytest.fixture
def run(monkeypatch, capsys):
    def compare(*arguments):
        monkeypatch.setattr(sys, "argv", ["alignment", "compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out + err

    return compare


def test_equal_dumps_are_aligned(tmp_path, run):
    code, text = run(dump(tmp_path / "a"), dump(tmp_path / "b"))
    assert (code, "ALIGNED: 1 stages, 6 tensors" in text) == (0, True)


def test_a_wrong_output_is_named_where_it_is_made(tmp_path, run):
    wrong = changed("Module.model.layers.0.act.SiLU.forward.0", Norm=7.7, Mean=0.2)
    code, text = run(dump(tmp_path / "a"), dump(tmp_path / "b", wrong))
    assert (code, "first introduced divergence: model.layers.0.act, out output" in text) == (1, True)


def test_nan_in_one_output_fails(tmp_path, run):
    wrong = changed("Module.model.layers.1.attn.Attention.forward.0", Max=float("nan"), Min=float("nan"))
    code, text = run(dump(tmp_path / "a"), dump(tmp_path / "b", wrong))
    assert (code, "model.layers.1.attn" in text) == (1, True)


def test_a_replaced_class_stays_paired(tmp_path, run):
    renamed = {name.replace(".SiLU.", ".FusedSiLU."): value for name, value in CALLS.items()}
    assert run(dump(tmp_path / "a"), dump(tmp_path / "b", renamed))[0] == 0


@pytest.mark.parametrize("side", ("golden", "target"))
def test_a_call_that_one_side_lacks_fails_and_is_named(tmp_path, run, side):
    less = {name: value for name, value in CALLS.items() if ".act." not in name}
    both = (
        (dump(tmp_path / "a"), dump(tmp_path / "b", less))
        if side == "golden"
        else (dump(tmp_path / "a", less), dump(tmp_path / "b"))
    )
    code, text = run(*both)
    assert (code, f"module model.layers.0.act only in {side}" in text) == (1, True)


def test_no_common_names_is_an_error(tmp_path, run):
    other = {name.replace("model.layers", "net.blocks"): value for name, value in CALLS.items()}
    code, text = run(dump(tmp_path / "a"), dump(tmp_path / "b", other))
    assert (code, "no module in common" in text, "--map" in text) == (2, True, True)


@pytest.mark.parametrize("how", ("missing", "truncated", "empty"))
def test_a_damaged_dump_is_an_error_that_names_the_file(tmp_path, run, how):
    golden, target = dump(tmp_path / "a"), dump(tmp_path / "b")
    path = target / "dump.json"
    if how == "missing":
        path.unlink()
    else:
        path.write_text(path.read_text()[: len(path.read_text()) // 2] if how == "truncated" else "")
    code, text = run(golden, target)
    assert (code, str(target) in text, "Traceback" in text) == (2, True, False)


def test_a_wrong_python_number_is_named_at_its_operator(tmp_path, run):
    def operators(scale):
        entry = call()
        entry["input_kwargs"] = {"scale": {"type": "float", "value": scale}}
        return {"Functional.scaled_dot_product_attention.0.forward": entry}

    golden = dump(tmp_path / "a", operators(192**-0.5), level="L1")
    code, text = run(golden, dump(tmp_path / "b", operators(128**-0.5), level="L1"))
    assert code == 1
    assert "scaled_dot_product_attention" in text
    assert "kwargs.scale" in text
    assert run(golden, dump(tmp_path / "c", operators(192**-0.5), level="L1"))[0] == 0
