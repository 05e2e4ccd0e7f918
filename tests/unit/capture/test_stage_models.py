"""Whatever engine holds the models of a stage, hooks find them or say why not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from alignment.capture.stage_models import HOLDERS, stage_models
from alignment.errors import UnavailableError


def worker(**engines):
    return SimpleNamespace(**{**dict.fromkeys(set(HOLDERS.values())), **engines})


def test_models_are_found_in_every_kind_of_engine():
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    trains = SimpleNamespace(model=model)
    assert stage_models(worker(actor=trains), "update_actor") == {"": model}
    assert stage_models(worker(actor=SimpleNamespace(modules=[model])), "old_log_prob") == {"": model}
    assert stage_models(worker(actor=SimpleNamespace(modules=[model, other])), "old_log_prob") == {
        "0": model,
        "1": other,
    }
    generates = SimpleNamespace(named_modules=model.named_modules)
    assert stage_models(worker(engine=generates), "rollout") == {"": model}
    assert stage_models(worker(teacher=SimpleNamespace(engine=trains)), "teacher_log_prob") == {"": model}


@pytest.mark.parametrize("stage", ["reward", "export_weights", "values", "describe"])
def test_stages_without_a_model_here_have_none(stage):
    assert stage_models(worker(), stage) == {}


def test_a_model_out_of_reach_is_an_error_with_its_reason():
    def named_modules():
        raise RuntimeError("the engine runs in a process of its own")

    with pytest.raises(UnavailableError, match=r"cannot be watched \(the engine runs in a process of its own\)"):
        stage_models(worker(engine=SimpleNamespace(named_modules=named_modules)), "rollout")
