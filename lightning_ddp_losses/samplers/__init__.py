"""Samplers that split the batches of one process over W ranks, and the function that restores a common order of the ranks' rows.

* ``global_batch``: ``GlobalBatchSampler``, in the two forms that Lightning does not replace, and orders that are derived from the seed
* ``global_draw``: batches of one process, drawn on every rank, distributed to the ranks, and resumed in the middle of an epoch
* ``seeded_draw``: a draw without side effects on the sampler or on random numbers
* ``evaluation``: each row of an evaluation on one rank, with the same number of batches on every rank
* ``predictions``: ``gather_predictions``, the inverse: rows of all ranks in the order of the dataset; ``row_lists``: rows of other shapes

To resume on another number of GPUs, keep the global batch. ``batch_size`` counts the rows of one rank. One device needs the strategy too::

    def train(devices, ckpt_path=None):
        loader = DataLoader(dataset, batch_size=256 // devices, shuffle=True, num_workers=4)
        trainer = Trainer(strategy=DDPLossStrategy(use_global_sampler=True), devices=devices, max_epochs=10)
        trainer.fit(model, loader, ckpt_path=ckpt_path)


    train(devices=8)  # killed in an epoch
    train(devices=4, ckpt_path="last.ckpt")  # continues with the next batch

For a custom sampler, pass ``batch_sampler=GlobalBatchSampler.batches(sampler, 256)`` to the loader. The option does not change it.
Under ``DDPLossStrategy`` checkpoints also contain every rank's random numbers (torch, numpy, Python, device). On the same number of ranks
dropout continues with the next masks. On another number the generators are seeded from the run's seed, the step and the rank, and the log
reports it. Random numbers of workers are not restored inside an epoch, and neither are the random numbers of an accumulation window's first
micro-batches.
"""

from lightning_ddp_losses.samplers.global_batch import GlobalBatchSampler
from lightning_ddp_losses.samplers.predictions import gather_predictions

__all__ = ["GlobalBatchSampler", "gather_predictions"]
