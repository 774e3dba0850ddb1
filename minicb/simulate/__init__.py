"""The real scheduler without a GPU: a roofline cost model, a virtual clock, workloads, and scenarios to run."""
