"""The parts of `kvjax.experiments.train_gate`."""
