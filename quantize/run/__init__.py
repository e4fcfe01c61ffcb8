"""A plan being carried out: the job, its folder, journal and parts, executors, room on disk, the way to the Hub."""
