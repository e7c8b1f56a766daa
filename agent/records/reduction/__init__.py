"""What the ranks have merged by themselves, with collectives of the job."""
