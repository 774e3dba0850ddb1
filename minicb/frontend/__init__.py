"""What people meet: the command line, batch files, OpenAI's request forms."""
