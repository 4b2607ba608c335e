"""Hugging Face Trainer, on a two-layer GPT-2 of eight dimensions."""

from __future__ import annotations

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from conftest import same, same_state
from wngrad import WNAdam, WNGrad, neuron_groups, rate_metrics
from wngrad.integrations.transformers import RateCallback, log_rates

STEPS = 6


def model(**config):
    """With dropout, unless told otherwise: a checkpoint keeps the generators, too."""
    torch.manual_seed(0)
    small = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**small, **config))


def sentences():
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(11, (24, 8), generator=draw)
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(path, **options):
    settings = {"max_steps": STEPS, "save_steps": 3, "logging_steps": 1, "report_to": "none"}
    quiet = {"per_device_train_batch_size": 4, "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(output_dir=str(path), **{**settings, **quiet, **options})


def trainer(path, make, net=None, collate=default_data_collator, **options):
    """A trainer with an optimizer and a schedule of ours."""
    net = net or model()
    opt = make(net.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    return Trainer(
        net,
        arguments(path, **options),
        data_collator=collate,
        train_dataset=sentences(),
        eval_dataset=sentences()[:4],
        optimizers=(opt, schedule),
    )


MAKERS = {
    "wngrad": WNGrad,
    "wngrad-momentum": lambda params: WNGrad(params, lr=0.5, momentum=0.9, nonfinite="skip"),
    "wngrad-gradient": lambda params: WNGrad(params, b_init="gradient"),
    "wnadam": WNAdam,
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def ours(trainer):
    return trainer.optimizer.optimizer  # as Accelerate wraps it


def test_a_resumed_run_is_the_run_that_was_never_stopped(make, tmp_path):
    whole = trainer(tmp_path / "whole", make)
    whole.train()
    again = trainer(tmp_path / "again", make)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert again.state.global_step == STEPS
    assert same(whole.model, again.model)
    assert same_state(ours(whole), ours(again))
    assert not same(whole.model, model())


def test_the_weights_are_those_of_a_plain_loop(make, tmp_path):
    """On the batches the trainer drew, with its clipping and its schedule."""
    batches = []

    def collate(rows):
        batches.append(default_data_collator(rows))
        return batches[-1]

    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    run = trainer(tmp_path, make, model(**still), collate, max_grad_norm=0.5)
    run.model_accepts_loss_kwargs = False  # the model's own loss, not one divided by the labels
    run.train()
    net = model(**still)
    opt = make(net.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    for batch in batches[:STEPS]:
        opt.zero_grad()
        net(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        schedule.step()
    assert same(run.model, net)


def test_the_logs_have_the_effective_rates(make, tmp_path):
    run = trainer(tmp_path, make)
    log_rates(run)
    run.train()
    history = [row for row in run.state.log_history if "loss" in row]
    assert len(history) == STEPS
    last = rate_metrics(run.optimizer)
    assert last == rate_metrics(ours(run))
    for row in history:
        rates = {key: row[key] for key in last}
        assert all(value >= 0 for value in rates.values())
    # The schedule has set λ to 0 after the last step, but the log was written before.
    assert history[0]["wngrad/group0/rate_median"] != history[1]["wngrad/group0/rate_median"]
    assert not any(key.startswith("wngrad") for key in run.state.log_history[-1])


def test_tensorboard_gets_the_rates_from_the_trainers_own_reporter(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    run = trainer(tmp_path, WNGrad, report_to="tensorboard")
    log_rates(run, prefix="rates/")
    run.train()
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    kept = [(e.step, e.value) for e in events.Scalars("train/rates/group0/rate_median")]
    told = [row["rates/group0/rate_median"] for row in run.state.log_history[:STEPS]]
    assert kept == list(enumerate(told, start=1))


def test_tensorboard_gets_a_picture_when_the_training_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    run = trainer(tmp_path, WNGrad, report_to=["tensorboard"])
    log_rates(run, picture=True)
    run.train()
    (image,) = EventAccumulator(str(tmp_path / "board")).Reload().Images("wngrad/rates")
    assert image.step == run.state.global_step


def test_as_a_plain_callback_it_fills_the_history(tmp_path):
    run = trainer(tmp_path, WNAdam, eval_strategy="steps", eval_steps=2)
    run.add_callback(RateCallback())
    run.train()
    rated = ["wngrad/group0/rate_max" in row for row in run.state.log_history]
    assert rated == ["loss" in row for row in run.state.log_history]
    assert not all(rated)


def test_other_optimizers_log_as_ever(tmp_path):
    run = trainer(tmp_path, torch.optim.SGD)
    log_rates(run)
    run.train()
    assert not any("wngrad" in key for row in run.state.log_history for key in row)


def test_the_trainer_can_make_the_optimizer_itself(tmp_path):
    """By class and arguments, which it needs where it shards the model first."""
    args = arguments(tmp_path, max_steps=2, weight_decay=0.1)
    made = (WNGrad, {"lr": 0.5, "momentum": 0.9})
    run = Trainer(model(), args, train_dataset=sentences(), optimizer_cls_and_kwargs=made)
    run.train()
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.1, 0.0]
    assert type(ours(run)) is WNGrad
    assert not same(run.model, model())


def test_without_a_schedule_of_ours_the_trainers_falls_from_lam_to_zero(tmp_path):
    net = model()
    opt = WNGrad(net.parameters(), lr=0.5)
    run = Trainer(net, arguments(tmp_path), train_dataset=sentences(), optimizers=(opt, None))
    run.train()
    used = [row["learning_rate"] for row in run.state.log_history if "loss" in row]
    assert used == pytest.approx([0.5 * (1 - k / STEPS) for k in range(STEPS)])
    assert opt.param_groups[0]["lr"] == 0


def test_bfloat16_and_accumulation_and_shared_rates(tmp_path):
    """`bf16` autocasts: the parameters and b stay in float32."""
    net = model()
    opt = WNGrad(neuron_groups(net), lr=0.5)
    run = trainer(tmp_path, lambda _: opt, net, bf16=True, gradient_accumulation_steps=2)
    log_rates(run)
    run.train()
    assert run.state.global_step == STEPS
    assert {mine["b"].dtype for mine in opt.state.values()} == {torch.float32}
    assert {float(mine["t"]) for mine in opt.state.values()} == {STEPS}
    assert "wngrad/transformer.h.0.mlp.c_fc/rate_median" in run.state.log_history[0]
