"""Layer-streamed forward passes and the statistics they give (filled by a later issue; see README, Roadmap)."""
