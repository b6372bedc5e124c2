"""What `kvjax.experiments.finetune` is made of."""
