"""`ddp-losses explain` finds pages by the words that people type."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from lightning_ddp_losses.cli import manual, search
from lightning_ddp_losses.cli.manual import find_page, run_explain, searched_pages

# what somebody types, and the pages that serve it: one of them is among the three that are shown
PHRASES = {
    # one word
    "resume": "resumed",
    "hangs": "hang",
    "slow": "cost",
    "timeout": "F44, hang, F36",
    "jupyter": "migrate notebook",
    "huggingface": "migrate hf_trainer",
    "multi node": "migrate slurm, migrate torchrun, migrate kubernetes",
    "onnx": "export",
    "export": "export",
    "csv": "own_data, ArrayDataModule",
    "knn": "retrieval",
    "map@r": "fit_numbers",
    "segmentation": "GlobalBatchLoss, DifferentiableMetric, global_rows",
    "dice loss": "global_rows",
    "my own loss function on several gpus": "global_rows, certificates",
    "is my custom loss correct with ddp": "certificates",
    "mixed precision": "precision",
    "learning rate": "F18",
    "continuous integration": "testing",
    "my own data": "own_data",
    "write my own check": "extending, RankCheck",
    "subclass of the strategy": "extending",
    "deadlock": "F32, hang",
    "oom": "microbatched, migrate fsdp2",
    "tensorboard": "migrate wandb",
    "webdataset": "F67, F71",
    "lora": "F38",
    "ema": "migrate lightly, F38",
    "pytest": "testing, loop",
    # how it shows
    "worse on 4 gpus": "F18, scale",
    "accuracy lower": "F01, F59, F18",
    "best checkpoint is wrong": "F55",
    "same batches on all gpus custom dataloader": "F67",
    "predictions in wrong order predict ddp": "gather_predictions",
    "clip_grad_norm in training_step": "F13",
    "save_checkpoint only on rank 0": "F45",
    "LoRA no gradient checkpoint": "F38",
    "None of the inputs have requires_grad=True. Gradients will be None": "F38",
    "labels rank offset": "F25",
    "recall too low on several gpus": "retrieval",
    "OnExceptionCheckpoint hangs": "F42",
    "loss is nan": "F79",
    "val loss different on each gpu": "F55, F56",
    "early stopping stops only one process": "F55",
    "training stuck at 99 percent end of epoch": "F36",
    "NCCL watchdog timeout allreduce": "F44, hang",
    "Expected to have finished reduction in the prior iteration": "F38",
    "mark a variable ready only once": "F40",
    "find_unused_parameters slow": "F39",
    "two gpus give same result as one gpu": "F67",
    "shuffle the same every epoch set_epoch": "F70",
    "iterable dataset duplicated on every rank": "F71",
    "batchnorm small batch per gpu": "F59, F60, SyncBatchNorm",
    "expected more than 1 value per channel": "F62",
    "validation counts more samples than the dataset": "F54",
    "loss does not decrease arcface weight not training": "F01",
    "different weights on each gpu after training": "apart, F02, F04, F10, SYNC",
    "gradient accumulation contrastive loss bigger batch": "F33, microbatched",
    "multiply loss by world size": "F21, F22",
    "all_gather no gradient simclr": "F20",
    "simclr ddp negatives from other gpus": "F29, migrate lightly",
    "memory bank queue different per gpu": "F64",
    "checkpoint keys start with module.": "F75",
    "resume with different number of gpus": "F76",
    "dropout masks identical across ranks": "F72",
    "token level loss average gradient accumulation wrong": "migrate token_means, F30, global_mean",
    "metric compute called before update": "F53",
    "torchmetrics compute hangs": "F51, F53",
    "no backend type associated with device type cpu": "F50",
    "one gpu crashed others keep waiting": "F42",
    "SIGTERM preemption slurm requeue": "F43, migrate slurm",
    "backbone finetuning unfreeze ddp": "F08",
    "torch.compile graph break collective": "F80",
    "partial fc 1 million identities": "ClassShardedLoss, migrate insightface",
    "clip training openai contrastive image text": "ClipLoss, migrate open_clip",
    "load balancing loss mixture of experts": "migrate moe",
    "DETR num_boxes normalize": "migrate detr",
    "knowledge distillation teacher": "migrate distillation",
    "is my ddp correct": "loop, audit, parity",
    "fit large batch in memory contrastive": "microbatched",
    "only first gpu is used": "F73",
    "training loss jumps down after resuming mid epoch": "F83",
    "average of averages uneven batch sizes": "F30",
    # and as many that nobody had in mind when the words were written
    "MPerClassSampler ddp": "F68, GlobalBatchSampler",
    "adding classes during training": "F06",
    "auroc wrong multi gpu": "logged, migrate torchmetrics, synced",
    "barrier in validation": "F45, hang, F53",
    "can i use accelerate": "migrate accelerate",
    "cosface": "losses, GlobalBatchLoss, F24, ClassShardedLoss",
    "cosine similarity of image and text huge batch": "ClipLoss, SigLipLoss, migrate open_clip",
    "ddp freezes after first epoch": "hang, F36",
    "deepspeed": "migrate fsdp2",
    "different losses on different ranks": "apart, F04, F56, F55",
    "distributed sampler drop last evaluation": "F54",
    "duplicate log entries different metrics per process": "logged, F56, F46",
    "fsdp": "migrate fsdp2, migrate fabric_fsdp2, ModelParallelLossStrategy",
    "google colab": "migrate notebook",
    "gpu utilization low with ddp": "cost, IDLE, F73",
    "gradients not averaged across devices": "F09, F10, SYNC, apart, F05",
    "how do I use triplet loss with miner on several gpus": "GlobalBatchMiner, metric_learning, migrate pml",
    "how many negatives does each gpu see": "F29, metric_learning",
    "how to cite this": "citation",
    "kaggle": "migrate notebook",
    "learning rate differs between processes": "F17",
    "loading checkpoint missing loss weights": "F75",
    "loss scaling overflow fp16 skipped step": "F14, F15, precision",
    "masked language modeling perplexity wrong": "F30, migrate token_means, tokens, global_mean",
    "model parameters out of sync between ranks": "apart, SYNC, F04, ParameterSyncCheck",
    "one rank has empty batch": "F37, F79, hang, F62, F31, F35",
    "pickle security checkpoint": "security",
    "process hangs at first backward": "hang, F32",
    "prototypes sinkhorn queue": "sinkhorn, migrate lightly",
    "reproduce single gpu results on 8 gpus": "scale, F18, audit, parity",
    "same augmentation on all workers": "F72, migrate augmentation",
    "save model on main process": "F45",
    "supervised contrastive loss ddp": "GlobalBatchLoss, F29, metric_learning",
    "training slower with more gpus": "cost",
    "uneven inputs join context": "F36, DDPLossStrategy",
    "vicreg": "vicreg, migrate lightly",
    "colbert": "maxsim, MaxSimLoss",
    "weights and biases": "migrate wandb",
}


@pytest.fixture(scope="module")
def index() -> search.Index:
    return search.Index(searched_pages())


@pytest.mark.parametrize(("typed", "pages"), PHRASES.items())
def test_words_lead_to_their_page(index: search.Index, typed: str, pages: str) -> None:
    found = index.best(typed)
    assert len(found) <= search.MOST
    assert set(found) & set(pages.split(", ")), found


# sentences as people say them, and the page of the symptom, which is the first one
SENTENCES = {
    "hang": [
        "it hangs on several GPUs",
        "hangs on multiple gpus",
        "training hangs",
        "it just hangs",
        "freezes with 2 gpus",
        "nothing happens, it hangs",
        "my program is stuck and never finishes",
        "stuck at initializing distributed",
        "it hangs in validation",
        "it hangs with torchrun",
        "my loop waits forever",
        "program does not finish on several gpus",
        "deadlock with ddp",
        "training freezes on 4 GPUs",
    ],
    "cost": [
        "it is slow on several gpus",
        "several gpus are slower than one",
        "ddp is slow",
        "training takes longer on two gpus",
    ],
    "stuck": ["loss does not go down on several gpus", "it does not learn with ddp", "my loss is constant"],
    "apart": ["weights differ between gpus", "my models diverge across ranks", "different weights on each gpu"],
    "scale": ["results differ from single gpu", "accuracy worse on multiple gpus", "worse results with more gpus"],
    "logged": ["wrong metric in validation"],
    "resumed": ["resume gives different result", "restart continues differently"],
    "stops": ["it crashes on several gpus", "stops with an error", "error on several gpus"],
}


@pytest.mark.parametrize(
    ("symptom", "typed"), [(symptom, typed) for symptom, sentences in SENTENCES.items() for typed in sentences]
)
def test_a_sentence_leads_to_its_symptom_first(index: search.Index, symptom: str, typed: str) -> None:
    assert index.best(typed)[0] == symptom


# what a reader of a fit's table types, and the page that is first
MEASURES = (
    "map@r",
    "r-precision",
    "what is a good MAP@R",
    "what do the numbers of a fit mean",
    "is my model overfitting",
)


def test_own_data_is_not_the_symptom_of_that_name(index: search.Index) -> None:
    for typed in ("my own data", "train on my own data", "my own csv data"):
        assert index.best(typed)[0] == "own_data"


@pytest.mark.parametrize("typed", MEASURES)
def test_measures_lead_to_the_page_that_explains_them(index: search.Index, typed: str) -> None:
    assert index.best(typed)[0] == "fit_numbers"


def test_the_pages_of_measures_lead_to_each_other_once(index: search.Index) -> None:
    assert "fit_numbers" in index.best("retrieval_measures")
    page = find_page(["fit_numbers"]) or ""
    for measure in ("precision@1", "R-precision", "MAP@R"):
        assert f"\n| {measure} | " in page
    # the other page names this one, and this one defines the measures itself
    assert "explain fit_numbers" in (find_page(["retrieval"]) or "")


# words about random numbers, and pages that are all among those that are shown
RANDOM_WORDS = {
    "dropout": "global_randomness, F72",
    "seed": "global_randomness, F72",
    "noise": "global_randomness, F72",
    "diffusion": "global_randomness, F72",
    "gan": "global_randomness",
    "augmentation": "migrate augmentation, F72",
    "worker_init_fn": "migrate augmentation",
}


@pytest.mark.parametrize(("typed", "pages"), RANDOM_WORDS.items())
def test_words_about_random_numbers_lead_to_all_their_pages(index: search.Index, typed: str, pages: str) -> None:
    found = index.best(typed)
    assert set(pages.split(", ")) <= set(found), found


def test_there_are_enough_phrases() -> None:
    assert len(PHRASES) >= 60
    pages = {page for pages in PHRASES.values() for page in pages.split(", ")}
    assert [page for page in sorted(pages) if not find_page(page.split())] == []


def test_words_for_a_page_are_of_pages_that_exist() -> None:
    topics = {page.topic for page in searched_pages()}
    assert set(search.typed_words()) <= topics
    assert all(find_page(topic.split()) for topic in topics)


def test_clipping_is_not_the_loss_of_that_name(index: search.Index) -> None:
    found = index.best("clip_grad_norm in training_step")
    assert found[0] == "F13"
    assert "ClipLoss" not in found


def test_a_word_that_no_page_has_is_taken_for_the_most_similar_one(index: search.Index) -> None:
    assert index.best("deadlok") == index.best("deadlock") != []
    assert index.best("qqqqq") == []
    # marks of SQL and of the query language are no words
    assert index.best('"; DROP TABLE pages; -- NEAR( * ^') == index.best("drop table pages near")
    assert index.best("the of") == []


@pytest.mark.parametrize("typed", ["best checkpoint is wrong", "onnx", "labels rank offset"])
def test_pages_are_shown_with_a_line_each(index: search.Index, typed: str) -> None:
    file = StringIO()
    assert run_explain(typed.split(), Console(file=file, width=110, color_system=None)) == 0
    text = " ".join(file.getvalue().split())
    for topic in index.best(typed):
        assert f"ddp-losses explain {topic}: {manual.title_of_topic(topic).replace('`', '')}" in text


def test_a_checkpointed_lora_is_told_what_trains_it() -> None:
    page = find_page(["F38"]) or ""
    assert "None of the inputs have requires_grad=True. Gradients will be None" in page
    assert "use_reentrant=False" in page
