"""Alerts on data and random numbers that repeat, and on a rank with odd losses."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.conditions.loop import loop_mistake
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import Count, Series
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import batches, ranks

SAME_BATCH = Condition(
    name="MpAgentSameBatch",
    summary="The model is trained on one and the same batch.",
    meaning="Every step has the data of the step before: the loss falls as it memorizes that "
    "batch, and the model learns nothing of the rest.",
    confirm="mp_agent_repeated_batch_info has the ranks and the first such step; print the "
    "batches of two steps in a row.",
    remedies=(
        "Iterate over the loader, for batch in loader, instead of next(iter(loader)), which begins "
        "an epoch on every step.",
        "Check that __getitem__ of the dataset uses its index, and that the sampler or generator "
        "moves on from step to step.",
        "Nothing, if one batch is overfitted on purpose, as a test of the loop.",
    ),
    why="The first batch of an epoch is the same one every time, unless samples are drawn at "
    "random.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(Series(metric=batches.REPEATED_STEPS)),
            counts_steps=True,
            description="The model of run {run} got the same batch at every look over "
            "{value|count} steps.{mp_agent_repeated_batch_info| Seen: |ranks step} Other batches "
            "were there; overfitting one batch on purpose looks the same.",
            reason="No delay: three pairs of steps, 13 steps apart, had one and the same batch.",
        ),
    ),
    quiet=("a training on all data at once, which has no other batch",),
    needs=((Quantity.BATCHES,),),
    guidance=Guidance(
        harm="The run memorizes one batch, and what it computes from now on is worth nothing. Stop "
        "it and correct the loop, unless that is on purpose.",
        query='mp_agent_batch_repeated_steps{run="RUN"} > 0',
        reading="The number of steps since the model first got that batch. The first tensors of "
        "the first forward are compared by a few of their elements, on two steps of every 13. "
        "It counts only if a DataLoader with several batches delivered, or other batches came "
        "before, also on a rank with data of its own: a training on all of its data at once "
        "repeats them, too.",
        causes=(
            "next(iter(loader)) within the loop: it begins a new epoch on every step.",
            "A dataset that returns the same item for every index.",
            "A generator that is seeded on every step, or a loader that is stuck.",
            "A batch that was taken before the loop to overfit it.",
        ),
        false_positives=(
            "One batch that is overfitted on purpose.",
            "A model whose inputs are constants, while what varies enters the loss elsewhere.",
        ),
        samples=("shard_data",),
        panels=(panels.BATCHES, panels.LOSS),
    ),
)


WORKERS_REPEAT_BATCHES = Condition(
    name="MpAgentWorkersRepeatBatches",
    summary="Workers of a DataLoader deliver the same batches: each reads the whole stream.",
    meaning="Every batch comes once from each worker: an epoch is as many times as long as the "
    "data, consecutive steps use the same samples, and the model overfits them.",
    confirm="Print the batches of two steps in a row, with num_workers=0 as well: with one process "
    "they differ.",
    remedies=(
        "In __iter__ of the IterableDataset, let each worker read its own part: "
        "torch.utils.data.get_worker_info() has id and num_workers, as in islice(samples, id, "
        "None, num_workers).",
        "Several ranks and workers: part k of n with k = rank * num_workers + id and n = "
        "world_size * num_workers.",
        "Or set num_workers=1.",
    ),
    why="Each worker gets a copy of the dataset. Of one with an index the loader gives each worker "
    "other indices; of a stream it cannot.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(Series(metric=batches.DOUBLED_PAIRS)),
            description="Of the last eight pairs of consecutive steps of run {run} that were "
            "looked at, {value|count} had the same batch twice, delivered by several workers that "
            "read an IterableDataset.",
            reason="No delay: two of at most eight pairs of steps, 13 steps apart, had the same "
            "batch.",
        ),
    ),
    quiet=("a stream that its workers divide",),
    needs=((Quantity.BATCHES,),),
    guidance=Guidance(
        harm="No state is damaged; the run trains on less data than it counts, several times in a "
        "row. Correct the dataset within the day.",
        query='mp_agent_batch_doubled_pairs{run="RUN"} > 0',
        reading="How many of the last eight pairs of neighbouring steps had the same batch. The "
        "first tensors of the first forward are compared by a few of their elements.",
        causes=("__iter__ of an IterableDataset that does not ask get_worker_info().",),
        false_positives=(
            "A stream that is to give each batch several times in a row, by several workers.",
        ),
        samples=("shard_data",),
        panels=(panels.BATCHES, panels.LOSS),
    ),
)


RANKS_SHARE_BATCHES = Condition(
    name="MpAgentRanksShareBatches",
    summary="Ranks are trained on the same batches.",
    meaning="The average over these ranks is the gradient of one rank: they cost as much as they "
    "did, and add nothing.",
    confirm="mp_agent_shared_batch_info has the ranks and the first such step; their "
    "mp_agent_rank_loss are equal, unless dropout or augmentation differ.",
    remedies=(
        "Give the DataLoader sampler=DistributedSampler(dataset), and call "
        "sampler.set_epoch(epoch) before each epoch.",
        "For an IterableDataset, let each rank skip to its own part: "
        "split_dataset_by_node, or islice(samples, rank, None, world_size).",
        "Where batches are drawn at random, seed the generator by the global rank.",
        "Number the parts by the global rank, not by the rank within a node.",
    ),
    why="A DataLoader knows nothing of other ranks: without a sampler that does, each of them "
    "reads the whole dataset in the same order.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(Series(metric=batches.SHARED_STEPS)),
            counts_steps=True,
            description="Ranks of run {run} that average their gradients had the same batches at "
            "every look over {value|count} steps.{mp_agent_shared_batch_info| Seen: |ranks step}",
            reason="No delay: they had the same batches at four looks in a row.",
        ),
    ),
    quiet=("ranks of tensor parallelism, which are to have the same data",),
    needs=((Quantity.BATCHES,),),
    guidance=Guidance(
        harm="The run trains with the batch size of fewer ranks than it pays for, at a learning "
        "rate that was chosen for all of them. Correct it before the run goes on for long.",
        query='mp_agent_batch_shared_steps{run="RUN"} > 0',
        reading="The number of steps since the ranks first had the same batches. Only ranks are "
        "compared whose gradients DDP, FSDP or Megatron-Core averages; not those of tensor, "
        "pipeline and context parallelism, nor any where a process group or mesh dimension is "
        "named after sequences or contexts.",
        causes=(
            "A DataLoader without a DistributedSampler.",
            "A generator, or a shuffle, with one seed on all ranks, where the data is not split.",
            "A sampler or a file list that is numbered by the local rank.",
        ),
        false_positives=(
            "Full-batch training in which all ranks are to have all data.",
            "Ranks that share sequences by code of their own, below a wrapper over all ranks.",
        ),
        samples=("shard_data",),
        panels=(panels.BATCHES, panels.RANK_LOSSES),
    ),
)


SINGLE_ROW_BATCH = Condition(
    name="MpAgentSingleRowBatch",
    summary="Batches have a single row where others have several.",
    meaning="The gradient is that of one sample, which counts as much as a whole batch elsewhere, "
    "and is many times as noisy.",
    confirm="mp_agent_single_row_batch_info has the ranks, and the rows that are usual; print the "
    "shape of the batch on these ranks.",
    remedies=(
        "Check how these ranks make batches: batch_size, drop_last, a collate function, a shard "
        "with few samples.",
        "Look for an index or a squeeze that takes one row: batch[:1], or the first row with "
        "unsqueeze(0).",
    ),
    why="The number of rows is the same on all steps and ranks unless the loop makes it differ.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(Series(metric=batches.SINGLE_ROW_RANKS)),
            description="The batches of {value|count} rank(s) of run {run} have a single row."
            "{mp_agent_single_row_batch_info| Seen: |ranks usual}",
            reason="No delay: four looks in a row found a single one.",
        ),
    ),
    quiet=("a last batch of the epoch that has one row",),
    needs=((Quantity.BATCHES,),),
    guidance=Guidance(
        harm="The run goes on with noisier gradients than it was tuned for, or gives the few "
        "samples of a rank the weight of many. Investigate within the hour.",
        query='mp_agent_batch_single_row_ranks{run="RUN"} > 0',
        reading="The number of ranks whose first tensor in the model's first forward has the size "
        "1 along its first dimension, while the other ranks, or the looks before, had the same "
        "size of four or more. Batches of varying sizes are not judged.",
        causes=(
            "A rank whose shard holds one sample, or whose batch size was set by another variable.",
            "Code that takes one row of each batch from a certain step or epoch on.",
        ),
        false_positives=("A change to batches of one row on purpose, such as packed sequences.",),
        samples=("shard_data",),
        panels=(panels.BATCHES, panels.RANK_LOSSES),
    ),
)


_OUTLIERS = Count(metric=ranks.RANK_OUTLIER_STEPS, window=duration("incident_window"))

RANK_LOSS_OUTLIERS = Condition(
    name="MpAgentRankLossOutliers",
    summary="A rank has single losses far above all others.",
    meaning="Some batches of one rank are unlike all other data: their gradients are averaged into "
    "every update all the same.",
    confirm="mp_agent_rank_loss_outlier_info has the rank and its losses; plot mp_agent_rank_loss.",
    remedies=(
        "Check the samples of that rank at those steps: corrupt records, wrong labels, sequences "
        "of one token.",
        "Check its shard: read it with the checksum of its source.",
        "Skip its batches above a limit until the data is corrected.",
    ),
    why="All ranks train the same weights, so that losses of one rank alone come from its data or "
    "its hardware.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_OUTLIERS),
            description="Single losses of one rank of run {run} were far above all losses of the "
            "others.{mp_agent_rank_loss_outlier_info| Last seen: |rank loss usual highest}",
            reason="No delay: three losses among 64, and none of another rank's, are no chance.",
        ),
    ),
    quiet=("losses that scatter widely on all ranks",),
    needs=((Quantity.RANKS,),),
    guidance=Guidance(
        harm="Bad batches of one rank disturb every update that they are part of. Investigate "
        "within the hour.",
        query='increase(mp_agent_rank_loss_outlier_steps_total{run="RUN"}[15m])',
        reading="Steps at which three or more of the last 64 losses of a rank were at least four "
        "times as far from the usual loss as the highest one of all other ranks, and twice the "
        "usual loss. Where the losses of a rank scattered more or less than those of the others "
        "when the run began, as with a seventh of the tokens, the distance that is required grows "
        "with the square of that ratio.",
        causes=(
            "A shard with corrupt records, or with wrong labels.",
            "A worker or a file system that returns damaged data on that node.",
            "A device that computes wrong values now and then.",
        ),
        false_positives=(
            "Ranks that have different tasks or sources of data on purpose.",
            "Losses that are sums divided by the tokens of all ranks, where one rank has many more "
            "tokens than the others all the time.",
        ),
        samples=("check_batch",),
        panels=(panels.RANK_LOSSES, panels.LOSS),
    ),
)


RANK_LOSS_UNLIKE = Condition(
    name="MpAgentRankLossUnlike",
    summary="The losses of a rank are unlike those of all others.",
    meaning="One rank trains on other data, or with other labels, than the rest; the average "
    "gradient follows both.",
    confirm="mp_agent_rank_loss_level_info has the rank, its usual loss and that of the others; "
    "plot mp_agent_rank_loss.",
    remedies=(
        "Check the shard of that rank: its labels, its tokenizer, its preprocessing, padding.",
        "Shuffle the samples over all ranks.",
        "Compute the loss of one batch on this rank and another one: if they differ, check the "
        "device.",
    ),
    why="All ranks train the same weights; of samples that are dealt out at random their losses "
    "have one level.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(Series(metric=ranks.RANK_LEVEL_STEPS)),
            keep=duration("rank_keep"),
            description="For {value|count} steps the losses of one rank of run {run} have been "
            "unlike those of all others."
            "{mp_agent_rank_loss_level_info| It is: |rank loss usual highest}",
            reason="No delay: three quarters of 32 losses are twice, or half, those of the others.",
        ),
    ),
    quiet=("losses that scatter widely on all ranks",),
    needs=((Quantity.RANKS,),),
    guidance=Guidance(
        harm="A part of each update comes from data unlike the rest. Investigate within the day, "
        "and at once where labels may be wrong.",
        query='mp_agent_rank_loss_level_steps{run="RUN"} > 0',
        reading="Three quarters of the rank's last 32 losses are above twice the upper quartiles "
        "of all other ranks, or below half of their lower ones. A rank whose losses scattered more "
        "than those of the others when the run began does not count as low: of few tokens, most "
        "losses are low, and some very high.",
        causes=(
            "A shard with wrong labels, another tokenizer, or damaged records.",
            "A rank that masks its labels, pads or normalizes otherwise.",
            "Samples that are dealt out by source or length instead of at random.",
        ),
        false_positives=(
            "Ranks that have different tasks or sources of data on purpose. Ranks that train "
            "models of their own (`strategy=independent`) are not compared.",
            "Losses that are sums divided by the tokens of all ranks, where one rank has many more "
            "tokens than the others all the time.",
        ),
        samples=("check_batch",),
        panels=(panels.RANK_LOSSES, panels.LOSS),
    ),
)


EPOCH_REPEATED = loop_mistake(
    "epoch repeated",
    name="MpAgentEpochRepeated",
    summary="Every pass over the data has the same batches, in the same order.",
    meaning="The data are shuffled, by the same numbers in each epoch: a DistributedSampler by its "
    "seed and the number of the epoch, which it is not given, another loader by random numbers "
    "whose seed each epoch sets again. Every epoch has one order, and dropout may leave out the "
    "same units. The model trains, with batches that are less random than they were meant to be.",
    confirm="Print the first batch of two epochs on one rank: they are equal.",
    remedies=(
        "Call sampler.set_epoch(epoch) before each pass over the loader, also of a sampler that is "
        "made again in each epoch.",
        "Set the seed, and make the loader's generator, once before the loop over epochs; or use a "
        "seed that follows the epoch. An evaluation that sets a seed is to restore the state, as "
        "torch.random.fork_rng() does.",
        "Nothing, with shuffle=False, where one order is meant.",
    ),
    why="The permutation of a DistributedSampler is made from seed + epoch, and the epoch is 0 "
    "until set_epoch is called; that of shuffle=True is drawn from torch's random numbers, or from "
    "the loader's generator, as the pass begins.",
    description="On {value|count} consecutive steps, run {run} trained on batches of a loader that "
    "shuffles, in the order of the two passes before.",
    quiet="passes that are begun again, or made twice",
    harm="No state is damaged; the model may end a little worse. Fix it before the next start.",
    reading="The number of consecutive steps in passes in the order of the two before.",
    causes=(
        "sampler.set_epoch(epoch) is missing in the loop over epochs.",
        "set_epoch of another sampler, or of the loader in place of its sampler.",
        "torch.manual_seed, seed_everything, or a generator with a fixed seed, within the loop "
        "over epochs.",
        "An evaluation after each epoch that sets a seed, and leaves it.",
    ),
    false_positives=(
        "A small set of data whose order is to stay, with shuffle=True.",
        "Data that are replaced in place between passes, as those of a buffer: the order repeats.",
        "A first epoch of three passes or more in one order on purpose, or trials that restore "
        "weights by hand and keep the optimizer.",
    ),
    samples=("shard_data",),
    panels=(panels.LOSS,),
)


SEED_REPEATED = loop_mistake(
    "seed repeated",
    name="MpAgentSeedRepeated",
    summary="The seed is set to the same number at every step: its random numbers repeat.",
    meaning="Whatever is drawn after it repeats: dropout leaves out the same units at every step, "
    "and noise, augmentation and samples are the same. What they were to regularize is not, and "
    "units that are always left out are not trained.",
    confirm="Print torch.rand(1) right before the forward pass: it is the same at every step.",
    remedies=(
        "Set the seed once, before the loop, or from the number of the step.",
        "For a part that is to be reproducible, use a torch.Generator of its own, or "
        "torch.random.fork_rng().",
    ),
    why="All random numbers follow from the seed: setting it begins the same sequence again.",
    description="On {value|count} consecutive steps, run {run} set the seed of torch's random "
    "numbers to the same value, and drew the same numbers from it before backward.",
    quiet="a seed that is set a few times",
    harm="No state is damaged, but what was to be random is not. Fix it within the hour.",
    reading="The number of consecutive steps with the same seed and the same random numbers.",
    causes=(
        "torch.manual_seed in the loop, or in a function that it calls, such as one that makes a "
        "batch, evaluates, or logs samples.",
        "set_seed or seed_everything of a library at every step.",
    ),
    false_positives=(
        "Numbers that are to be the same at every step, as a fixed projection or data made from a "
        "seed, where nothing else is drawn: give them a torch.Generator of their own.",
        "A test of determinism that repeats one step.",
    ),
    samples=("order_of_the_loop",),
    panels=(panels.LOSS,),
)


CONDITIONS = (
    SAME_BATCH,
    WORKERS_REPEAT_BATCHES,
    RANKS_SHARE_BATCHES,
    SINGLE_ROW_BATCH,
    EPOCH_REPEATED,
    SEED_REPEATED,
)
OF_RANK_LOSSES = (RANK_LOSS_OUTLIERS, RANK_LOSS_UNLIKE)
