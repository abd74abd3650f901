data "aws_vpc" "here" {
  id      = var.vpc_id == "" ? null : var.vpc_id
  default = var.vpc_id == "" ? true : null
}

data "aws_route_tables" "here" {
  vpc_id = data.aws_vpc.here.id
}

# Nodes talk to each other on ports that Ray chooses; nobody else talks to them, but you by ssh.
resource "aws_security_group" "cluster" {
  name        = "${var.name}-cluster"
  description = "Nodes of a Ray cluster"
  vpc_id      = data.aws_vpc.here.id
}

resource "aws_vpc_security_group_ingress_rule" "nodes" {
  description                  = "Nodes of the cluster"
  security_group_id            = aws_security_group.cluster.id
  referenced_security_group_id = aws_security_group.cluster.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_ingress_rule" "ssh" {
  for_each = toset(var.ssh_cidrs)

  description       = "ray up, ray dashboard"
  security_group_id = aws_security_group.cluster.id
  cidr_ipv4         = each.value
  from_port         = 22
  to_port           = 22
  ip_protocol       = "tcp"
}

resource "aws_vpc_security_group_egress_rule" "all" {
  description       = "Store, registries, APIs"
  security_group_id = aws_security_group.cluster.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
}

# EFA bypasses the kernel: it needs rules that name the group itself, in both directions.
resource "aws_vpc_security_group_egress_rule" "nodes" {
  description                  = "Nodes of the cluster"
  security_group_id            = aws_security_group.cluster.id
  referenced_security_group_id = aws_security_group.cluster.id
  ip_protocol                  = "-1"
}

# Machines near each other, in one zone.
resource "aws_placement_group" "gpus" {
  name     = "${var.name}-gpus"
  strategy = "cluster"
}

# Traffic to the store stays inside AWS and costs nothing, also from subnets behind a NAT gateway.
resource "aws_vpc_endpoint" "s3" {
  vpc_id            = data.aws_vpc.here.id
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = data.aws_route_tables.here.ids
}

resource "aws_budgets_budget" "monthly" {
  count = var.monthly_budget_usd > 0 ? 1 : 0

  name         = "${var.name}-monthly"
  budget_type  = "COST"
  limit_amount = tostring(var.monthly_budget_usd)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"

  # The bucket has this tag from the provider's default_tags, machines and their volumes from clusters/aws.yaml. A second tag here
  # would narrow the budget to what has both.
  cost_filter {
    name   = "TagKeyValue"
    values = [format("user:project$%s", var.name)]
  }

  lifecycle {
    precondition {
      condition     = length(var.budget_emails) > 0
      error_message = "A budget that tells nobody alarms nobody; set budget_emails, or monthly_budget_usd = 0."
    }
  }

  dynamic "notification" {
    for_each = [80, 100]

    content {
      comparison_operator        = "GREATER_THAN"
      threshold                  = notification.value
      threshold_type             = "PERCENTAGE"
      notification_type          = "ACTUAL"
      subscriber_email_addresses = var.budget_emails
    }
  }
}
