"""What tests share: graphs and cases to run, ways to compare, programs that tests start as processes of their own."""
