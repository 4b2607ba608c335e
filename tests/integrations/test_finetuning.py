"""Fine-tuning in the trainers: peft's LoRA and LoRA+, Trainer, TRL's SFTTrainer, Accelerate."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from conftest import same, same_state
from wngrad import WNMuon, matrix_groups, show_rates
from wngrad.muon_numbers import FRESH

peft = pytest.importorskip("peft")
create_loraplus_optimizer = pytest.importorskip("peft.optimizers").create_loraplus_optimizer
STEPS = 4


def base():
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **small, **heads))


def adapted(**options):
    """A tiny Llama with LoRA beside all of its linear layers."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **options)
    return peft.get_peft_model(base(), config)


def sentences():
    tokens = torch.randint(32, (32, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(path, **options):
    settings = {"max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "report_to": "none"}
    quiet = {"per_device_train_batch_size": 4, "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(output_dir=str(path), **{**settings, **quiet, **options})


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def ours(run):
    return run.optimizer.optimizer  # as Accelerate wraps it


def test_lora_of_peft_is_matrices_and_what_is_frozen_stays():
    model = adapted()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt = WNMuon(model, finetune=True)
    tokens = torch.stack([each["input_ids"] for each in sentences()[:4]])
    for _ in range(2):
        opt.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        opt.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(trained(model))
    assert {p for p in opt.state if opt.state[p]} == set(trained(model).values())
    for name, p in trained(model).items():
        assert any(p is q for group in opt.param_groups[:1] for q in group["params"])
        norm = before[name].square().sum(1).mean().sqrt().item()
        assert float(opt.state[p]["norm"]) == pytest.approx(norm or FRESH, rel=1e-5)
    assert "lora_B" in str(matrix_groups(model))


def test_lora_plus_of_peft_keeps_its_ratio_to_the_bit():
    def moved(ratio):
        model = adapted()
        before = {name: p.detach().clone() for name, p in trained(model).items()}
        opt = create_loraplus_optimizer(
            model, WNMuon, lr=0.25, loraplus_lr_ratio=ratio, finetune=True
        )
        # A gradient for A, too, which has none before B has moved.
        for i, p in enumerate(trained(model).values()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        opt.step()
        return {name: p.detach() - before[name] for name, p in trained(model).items()}

    one, plus = moved(1.0), moved(16.0)
    for name in one:
        factor = 16 if "lora_B" in name else 1
        assert torch.equal(factor * one[name], plus[name])
        assert one[name].abs().max() > 0


@pytest.mark.parametrize("make", [base, adapted])
def test_the_trainer_makes_it_by_class_and_arguments(make, tmp_path):
    made = (WNMuon, {"lr": 0.3, "finetune": True})
    options = {"lr_scheduler_type": "constant", "weight_decay": 0.1}
    run = Trainer(
        make(),
        arguments(tmp_path, **options),
        train_dataset=sentences(),
        optimizer_cls_and_kwargs=made,
    )
    run.train()
    assert type(ours(run)) is WNMuon
    assert all(group["finetune"] for group in ours(run).param_groups)
    assert {row["learning_rate"] for row in run.state.log_history if "loss" in row} == {0.3}
    assert all("norm" in its for its in ours(run).state.values())
    with ours(run).averaged():
        assert run.evaluate(sentences()[:4])["eval_loss"] > 0


def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path):
    def trainer(path):
        made = (WNMuon, {"finetune": True})
        return Trainer(
            base(), arguments(path), train_dataset=sentences(), optimizer_cls_and_kwargs=made
        )

    whole, again = trainer(tmp_path / "whole"), trainer(tmp_path / "again")
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert same(whole.model, again.model)
    assert same_state(ours(whole), ours(again))


def test_rates_shown_in_the_groups_survive_the_trainers_schedule_and_checkpoints(tmp_path):
    model = adapted()
    opt = WNMuon(model, finetune=True)
    show_rates(opt, every=1)
    run = Trainer(model, arguments(tmp_path), train_dataset=sentences(), optimizers=(opt, None))
    run.train()
    used = [row["learning_rate"] for row in run.state.log_history if "loss" in row]
    assert used == pytest.approx([0.3 * (1 - k / STEPS) for k in range(STEPS)])
    for group in opt.param_groups:
        stepped = any("b" in opt.state.get(p, {}) for p in group["params"])
        assert ("d" in group) == stepped
        # The last step was taken at a quarter of ρ.
        assert not stepped or group["effective_lr"] == pytest.approx(group["d"] * 0.3 / 4)


def test_an_accelerated_loop_is_a_plain_loop(tmp_path):
    def loop(prepare, backward):
        model = adapted()
        opt = WNMuon(model, finetune=True)
        model, opt = prepare(model, opt)
        for k in range(3):
            tokens = torch.stack([each["input_ids"] for each in sentences()[4 * k : 4 * k + 4]])
            opt.zero_grad()
            backward(model(input_ids=tokens, labels=tokens).loss)
            opt.step()
        return model, opt

    accelerator = Accelerator(cpu=True)
    mine, opt = loop(accelerator.prepare, accelerator.backward)
    plain, other = loop(lambda *both: both, lambda loss: loss.backward())
    assert same(accelerator.unwrap_model(mine), plain)
    assert same_state(opt.optimizer, other)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefghijklmnop"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


@pytest.mark.filterwarnings("ignore")  # TRL's own, of a model as small as this
def test_sft_trainer_of_trl_makes_it_by_class_and_arguments(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = datasets.table.InMemoryTable.from_pydict({"input_ids": [[3, 4, 5, 6], [7, 8, 9]] * 4})
    quiet = {"max_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    args = trl.SFTConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_length=8, bf16=False,
        logging_steps=1, lr_scheduler_type="constant", gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False, **quiet,
    )  # fmt: skip
    run = trl.SFTTrainer(
        base(),
        args,
        train_dataset=datasets.Dataset(rows, fingerprint="rows"),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear"),
        optimizer_cls_and_kwargs=(WNMuon, {"finetune": True}),
    )
    run.train()
    stepped = {p for p in ours(run).state if "norm" in ours(run).state[p]}
    assert stepped == set(trained(run.model).values())
    assert {row["learning_rate"] for row in run.state.log_history if "loss" in row} == {0.3}
