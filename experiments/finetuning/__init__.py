"""What `experiments.finetune` is made of."""
