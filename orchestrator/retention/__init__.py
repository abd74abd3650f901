"""What a store keeps: garbage collection, the check of every object (fsck), the inventory, repairs."""
