"""Many clients on few GPUs: federated training with Flower."""
