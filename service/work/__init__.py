"""Long work in a store, which one process of many runs at a time: batches and fine-tuning jobs."""
