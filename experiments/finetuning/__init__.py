"""The parts of `kvjax.experiments.finetune`."""
