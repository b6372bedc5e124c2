"""Programs compiled for TPUs, and what the compiler says they take."""
